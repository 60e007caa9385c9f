"""What a process uses of its host: child processes, locks, logs, GPUs, identity. Knows neither brokers nor settings."""
