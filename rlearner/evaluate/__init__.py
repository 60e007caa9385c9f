"""``rlearner eval``: measures a model on held-out tasks, without training."""
