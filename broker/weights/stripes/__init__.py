"""Weights that the ranks of a sharded learner send in stripes: each broadcasts what it holds, and
nobody gathers.
"""
