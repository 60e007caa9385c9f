"""Shared parts of the benchmarks: fleets of real processes, simulated servers, cases, statistics.
No commands.
"""
