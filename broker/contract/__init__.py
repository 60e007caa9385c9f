"""The wire contract: messages, streams and the rules of their values; source of ``docs/wire.md``."""
