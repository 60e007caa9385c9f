"""Tokenizers, chat templates, guided decoding and the OpenAI-compatible HTTP API. May import ``broker``; imports no role."""
