"""The environment hub, which runs episodes.

It may import ``broker``, ``rlearner_text`` and ``rlearner_sandbox`` only.
"""
