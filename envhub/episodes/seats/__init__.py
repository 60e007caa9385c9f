"""Plays episodes with several speakers: each seat by the trained policy, another policy, a model at
an endpoint, or a script.
"""
