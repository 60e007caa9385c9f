"""OpenAI's HTTP protocol: messages, server and client.

Rollout servers and environment hubs (for agents) serve it; rewards (for judges) and the engine
``openai`` are clients. ``server`` serves Anthropic's protocol, too: ``rlearner_text.anthropic``
turns its requests into chats, and shares keys, limits, sampling and streaming with this package.
"""
