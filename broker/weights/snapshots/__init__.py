"""Versions of the weights as files, for servers that the learner cannot reach."""
