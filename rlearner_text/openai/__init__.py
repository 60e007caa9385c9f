"""OpenAI's HTTP protocol: what clients send and get, a server for it, and a client.

A rollout server answers it, a hub answers agents by it, a reward asks judges by it, and the engine ``openai`` asks through it. It runs
on aiohttp, which is server and client in one, a dependency and no extra; only ``server`` and ``client`` import it.
"""
