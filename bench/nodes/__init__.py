"""A learner over several nodes; each part is a module with ``measure(folder) -> figures``."""
