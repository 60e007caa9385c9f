"""``rlearner up``: a whole run on one machine, as separate processes."""
