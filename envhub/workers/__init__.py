"""Environments in processes of their own, which may hang, crash or grow without harm to the hub."""
