"""Plays episodes: observes, samples and acts until the environment or a limit ends the episode."""
