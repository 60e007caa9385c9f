"""The matrix of model families, computed by running each of them: ``python -m bench.families``."""
