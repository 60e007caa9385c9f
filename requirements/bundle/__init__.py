"""A folder that installs rlearner on a machine without a network: what builds it, and what it runs
there.
"""
