"""Anthropic's HTTP protocol, on the server of ``rlearner_text.openai``.

A request to /v1/messages becomes a chat, whose answer becomes content blocks.
"""
