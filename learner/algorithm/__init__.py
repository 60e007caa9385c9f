"""Turns scored groups into training samples and losses. Pure, except for scoring by models."""
