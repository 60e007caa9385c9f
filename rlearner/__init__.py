"""The operator's command ``rlearner``. May import ``learner`` and what both share; nothing imports
it.
"""
