"""Durable messaging on JetStream: work queues, logs, key-value buckets, dead letters; at least
once.
"""
