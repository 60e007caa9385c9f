"""Questions with reference answers."""
