"""Training with DeepSpeed's ZeRO."""
