"""What a declared metric is: its name, unit, kind, meaning and the processes that report it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Kind = Literal["gauge", "counter", "histogram"]
# ``offline`` stands for supervised fine-tuning, preference training and distillation; ``page`` for
# what every process adds on its own page /metrics.
Source = Literal[
    "learner", "rollout", "envhub", "rewardhub", "broker", "offline", "page", "exporter"
]
Unit = Literal[
    "",  # a number without a unit
    "reward",  # of the run's reward function
    "share",  # 0 to 1
    "seconds",
    "unix seconds",
    "bytes",
    "GB/s",
    "tokens",
    "tokens/s",
    "nats",
    "version",  # the number of one
    "versions",
    "steps",
    "turns",
    "updates",
    "rows",
    "samples/s",
    "requests/s",
    "episodes/s",
    "groups",
    "groups or requests",
    "tickets",
    "episodes",
    "scores",
    "requests",
    "messages",
    "processes",
    "hosts",
    "cores",
    "threads",
    "transfers",
    "currency",
]

# Of the others, the title says enough.
_AXIS_UNITS: Final = ("versions", "tokens")


@dataclass(frozen=True)
class MetricDeclaration:
    """A metric, or a family of metrics whose names have variable parts.

    Attributes:
        name: as it is reported, or without ``rlearner_`` and ``_total`` for one that only
            Prometheus sees. ``<domain>`` is a part that becomes the label ``domain`` there, ``*`` a
            part that stays in the name.
        sources: the processes that report it.
        title: a few words in lower case for charts, tiles and columns; empty if none shows it.
        labels: of one that only Prometheus sees.
    """

    name: str
    unit: Unit
    sources: tuple[Source, ...]
    meaning: str
    kind: Kind = "gauge"
    title: str = ""
    labels: tuple[str, ...] = ()

    @property
    def heading(self) -> str:
        """Title of a chart, with the unit of its axis."""
        unit = f" in {self.unit}" if self.unit in _AXIS_UNITS else ""
        return f"{self.title[:1].upper()}{self.title[1:]}{unit}"
