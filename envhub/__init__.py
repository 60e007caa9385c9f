"""The environment hub: runs the episodes of a ticket's group. May import ``broker``, ``text`` and ``sandbox``, no other
role.
"""
