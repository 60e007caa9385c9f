"""What a process measures about itself, kept for its page ``/metrics``; imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping

from broker.contract import wire
from broker.jetstream.bus import Bus


class ProcessFigures:
    """Figures of this process, set on its event loop; other threads read them.

    Attributes:
        bus: the process's connection, whose counts are shown; None before there is one.
        depths: unacknowledged messages by stream and subject, where the process knows them.
        values: the newest metrics that the process reported.
    """

    def __init__(self) -> None:
        self.bus: Bus | None = None
        self.depths: Mapping[tuple[str, str], float] = {}
        self.values: Mapping[str, float] = {}

    def report(self, metrics: wire.Metrics) -> None:
        """Show these metrics from now on."""
        self.values = newest_values(self.values, metrics.values)


def newest_values(old_values: Mapping[str, float], values: Mapping[str, float]) -> dict[str, float]:
    """Return new metrics of a process, with evaluations, which one step's line holds."""
    return {name: value for name, value in old_values.items() if name.startswith("eval/")} | dict(
        values
    )
