"""OpenAI's HTTP protocol: messages, server and client.

Rollout servers and environment hubs (for agents) serve it; rewards (for judges) and the engine
``openai`` are clients. Only ``server``, ``streaming``, ``generation`` and ``client`` import
aiohttp.
"""
