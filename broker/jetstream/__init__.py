"""The durable side: work queues, logs, key-value buckets, dead letters. At-least-once, never less."""
