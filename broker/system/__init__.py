"""What a process uses of its host: child processes, locks, logs, GPUs, identity; without brokers
and settings.
"""
