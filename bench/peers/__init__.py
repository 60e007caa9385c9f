"""rlearner and TRL on the same work, side by side: ``python -m bench.peers``."""
