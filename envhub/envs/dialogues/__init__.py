"""Environments in which two speakers talk to each other."""
