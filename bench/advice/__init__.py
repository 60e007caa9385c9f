"""Compares what ``rlearner advise`` predicts for twelve simulated fleets with what they do; see
``__main__``.
"""
