"""Environments of questions with reference answers."""
