"""Shared by all processes: wire contract, messaging, settings, process runtime, weights; imports no
role.
"""

import broker.system.old_imports  # noqa: F401  finds old import paths
