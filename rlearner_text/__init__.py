"""Tokenizers, chat templates, guided decoding and the OpenAI-compatible HTTP API. Imports no role."""
