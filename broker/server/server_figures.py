"""Measures a private nats-server and the disk under its store, for the page ``/metrics`` of
``broker serve``.
"""

from __future__ import annotations

from contextlib import suppress

import psutil

from broker.server.private_server import BrokerServer
from broker.system.disk_space import disk_figures


def server_figures(server: BrokerServer) -> dict[str, float]:
    """Return processor time and memory of the server, and the free space for its store."""
    figures = disk_figures(server.store)
    with suppress(psutil.Error, AttributeError):  # it has ended, or did not start yet
        process = psutil.Process(server.pid)
        cpu_times = process.cpu_times()
        figures["broker/server_cpu_s"] = cpu_times.user + cpu_times.system
        figures["broker/server_resident_bytes"] = float(process.memory_info().rss)
    return figures
