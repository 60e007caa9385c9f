"""The rollout server: generates tokens with the offered weights. May import ``broker``, ``text`` and ``sandbox``, no other role."""
