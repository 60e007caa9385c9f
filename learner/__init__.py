"""The learner: issues tickets, trains on the samples log, offers weights. May import broker, text
and sandbox.
"""
