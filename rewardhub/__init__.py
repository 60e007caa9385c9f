"""The reward hub: scores the episodes of a group. May import ``broker``, ``text`` and ``sandbox``, no other role."""
