"""The learner: issues tickets, trains on the samples log, offers weights.

It may import broker, text and sandbox.
"""
