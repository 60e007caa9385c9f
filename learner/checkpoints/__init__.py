"""Checkpoints: their schedule, their contents, and writing them during training."""
