"""Evaluation on held-out tasks during training."""
