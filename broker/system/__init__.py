"""What a process uses of its host: children, locks, logs, GPUs. No brokers, no settings."""
