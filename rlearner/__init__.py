"""The command ``rlearner``: everything that people ask of a run. It may import ``learner`` and what both share; nothing imports it."""
