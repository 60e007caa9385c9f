"""One connection to NATS that never gives up, and calls over it. Knows nothing of streams."""
