"""The operator's command ``rlearner``. It may import ``learner`` and what both share; nothing imports it."""
