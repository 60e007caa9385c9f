"""Tokenizers, chat templates, guided decoding, OpenAI-compatible HTTP API. Imports no role."""
