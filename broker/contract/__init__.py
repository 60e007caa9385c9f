"""The wire contract: messages, streams, rules of their values; source of ``docs/wire.md``."""
