"""The environment hub: runs episodes. It may import ``broker``, ``text`` and ``sandbox``, but no other role."""
