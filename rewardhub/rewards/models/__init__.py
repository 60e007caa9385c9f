"""Rewards of models that read steps and tokens, and what rewards with a model share."""
