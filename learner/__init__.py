"""The learner: issues tickets, trains on the samples log and offers weights.

May import ``broker``, ``text`` and ``sandbox``.
"""
