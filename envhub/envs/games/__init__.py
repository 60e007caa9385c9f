"""Environments of games: gymnasium's frozen lake, and games implemented here."""
