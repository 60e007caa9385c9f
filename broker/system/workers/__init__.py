"""Worker processes that run users' code: starting, messages, limits and their output."""
