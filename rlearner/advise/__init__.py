"""A model of a run: fitted to measured figures, it predicts what a change of the fleet or of a
setting would bring.
"""
