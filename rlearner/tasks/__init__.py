"""The command ``rlearner tasks``."""
