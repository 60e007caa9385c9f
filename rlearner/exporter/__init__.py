"""The command ``rlearner exporter``: the figures of a whole run for Prometheus, read through its
broker.
"""
