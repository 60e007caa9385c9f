"""Checkpoints: when they are due, what is in them, and how they are written beside training."""
