"""``rlearner new``: a project folder with a configuration, an environment, a reward and their
tests.
"""
