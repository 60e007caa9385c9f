"""Runs from Python and notebooks: the processes of ``rlearner up`` below, as objects above."""
