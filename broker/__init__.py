"""Shared by all processes: wire contract, messaging, settings, process runtime, weights; imports no
role.
"""
