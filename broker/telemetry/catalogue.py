"""Finds the declaration of a metric by the name that a process reports."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

from broker.telemetry.declarations import MetricDeclaration
from broker.telemetry.run_metrics import RUN_METRICS

_KIND: Final = re.compile(r"<(\w+)>")


def _pattern(name: str) -> re.Pattern[str]:
    """Return the names of a family: ``<kind>`` is one part, ``*`` anything."""
    escaped = re.escape(name).replace(r"\*", ".+")
    return re.compile(_KIND.sub(r"(?P<\1>[^/]+)", escaped))


_BY_NAME: Final = {metric.name: metric for metric in RUN_METRICS}
# A part that becomes a label goes before one that may be anything.
_FAMILIES: Final = sorted(
    ((_pattern(name), metric) for name, metric in _BY_NAME.items() if "<" in name or "*" in name),
    key=lambda family: "*" in family[1].name,
)


def find_metric(name: str) -> MetricDeclaration | None:
    """Return the declaration of a reported metric, None if there is none."""
    metric, _ = match_metric(name)
    return metric


@lru_cache(maxsize=4096)
def match_metric(name: str) -> tuple[MetricDeclaration | None, tuple[tuple[str, str], ...]]:
    """Return the declaration of a reported metric, and the labels that its name contains."""
    if (metric := _BY_NAME.get(name)) is not None:
        return metric, ()
    for pattern, family in _FAMILIES:
        if match := pattern.fullmatch(name):
            return family, tuple(match.groupdict().items())
    return None, ()
