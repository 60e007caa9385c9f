"""``rlearner eval``: measure a model on held-out tasks, without training."""
