"""Plays episodes: observe, sample, act, until the environment or a limit ends one."""
