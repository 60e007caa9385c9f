"""The reward hub, which scores episodes. May import ``broker``, ``text`` and ``sandbox``, no other
role.
"""
