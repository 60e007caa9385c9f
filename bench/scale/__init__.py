"""How the core scales on one small machine: ``python -m bench.scale``."""
