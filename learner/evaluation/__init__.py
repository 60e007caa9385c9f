"""Evaluation on held-out tasks while training goes on."""
