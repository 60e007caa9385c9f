"""Runs environments in worker processes, which may hang, crash or grow without harm to the hub."""
