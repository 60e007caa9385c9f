"""The reward hub. May import ``broker``, ``rlearner_text`` and ``rlearner_sandbox`` only."""
