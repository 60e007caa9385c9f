"""Environments in which the policy uses a tool: search, Python, a web shop."""
