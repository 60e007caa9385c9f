"""The environment hub, which runs episodes.

It may import ``broker``, ``rlearner_text``, ``rlearner_sandbox`` and ``rlearner_workers`` only.
"""
