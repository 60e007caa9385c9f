"""Forward passes whose result for a token has the same bits whatever is computed next to it."""
