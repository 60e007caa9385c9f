"""Environments with a tool for the policy: search, Python, a web shop."""
