"""Agents of the user's own: programs that ask the policy over OpenAI's protocol, whatever they are written in.

``env: agent`` starts one for each episode, with an endpoint and a key of its own; ``envhub.envs.agent`` says how.
"""
