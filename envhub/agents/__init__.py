"""Runs agents: programs in any language that call the policy over OpenAI's protocol.

``env: agent`` starts one per episode, with its own endpoint and key; see ``envhub.envs.agent``.
"""
