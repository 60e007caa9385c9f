"""``rlearner audit``: every ticket in exactly one final state, every trained group exactly once, nothing too old, every gap named."""
