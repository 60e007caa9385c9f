"""``rlearner up``: a complete run on one machine, as separate processes."""
