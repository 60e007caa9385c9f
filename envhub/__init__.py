"""The environment hub, which runs episodes. It may import ``broker``, ``text`` and ``sandbox``
only.
"""
