"""A model of a run, fitted to measured figures, that predicts the effect of a change."""
