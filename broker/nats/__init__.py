"""A reconnecting NATS connection and request/reply calls on top of it, without streams."""
