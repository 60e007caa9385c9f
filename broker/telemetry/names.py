"""Turns the names of metrics into those of Prometheus, by one rule.

1. ``rlearner_`` comes first, and every character other than letters, digits and ``_`` becomes
  ``_``.
2. Units are spelled out in base units: ``time/…`` and ``…_s`` end in ``_seconds``, ``…_per_s`` in
   ``_per_second``, ``gbytes`` becomes ``bytes``.
3. A part that is a name of the run's (a domain, a reward, a policy) or one of a few (a reason, a
   stream) is replaced by the word for its kind, unless that stands there already, and becomes a
   label of that word: ``reward/lake/mean`` is ``rlearner_reward_domain_mean{domain="lake"}``.
4. What only grows while a process lives ends in ``_total``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from broker.telemetry.declarations import MetricDeclaration
from broker.telemetry.run_metrics import RUN_METRICS

PREFIX: Final = "rlearner_"
GIGA: Final = 1e9
NOT_FIGURES: Final = frozenset({"time"})  # when a line was written
# A hub that is not ours may report names of its own.
UNDECLARED: Final = "A metric that is not declared."


@dataclass(frozen=True)
class PrometheusName:
    """The name of a metric in Prometheus.

    Attributes:
        name: of the family, without the ``_total`` of a counter.
        labels: pairs of name and value.
        scale: factor from the metric's unit to the base unit.
        metric: its declaration.
    """

    name: str
    labels: tuple[tuple[str, str], ...]
    scale: float
    metric: MetricDeclaration

    @property
    def sample(self) -> str:
        """Name of the series."""
        return f"{self.name}_total" if self.metric.kind == "counter" else self.name


_BY_NAME: Final = {metric.name: metric for metric in RUN_METRICS}
# ``<kind>`` is one part, ``*`` anything; a part that becomes a label goes first.
_FAMILIES: Final = [
    (re.compile(re.sub(r"<(\w+)>", r"(?P<\1>[^/]+)", name).replace("*", ".+")), metric)
    for name, metric in sorted(_BY_NAME.items(), key=lambda item: "*" in item[0])
    if "<" in name or "*" in name
]
_INVALID: Final = re.compile(r"[^a-zA-Z0-9_]")


@lru_cache(maxsize=4096)
def prometheus_name(metric: str) -> PrometheusName:
    """Return the name in Prometheus of a metric such as ``reward/lake/mean``."""
    declaration, labels = _find_declaration(metric)
    name, scale = _with_units(
        _INVALID.sub("_", _without_repetition(declaration.name if labels else metric))
    )
    return PrometheusName(PREFIX + name, labels, scale, declaration)


def find_metric(name: str) -> MetricDeclaration:
    """Return the declaration of a reported metric; one without a title if there is none."""
    return prometheus_name(name).metric


def _find_declaration(name: str) -> tuple[MetricDeclaration, tuple[tuple[str, str], ...]]:
    """Return the declaration of a reported metric, and the labels that its name contains."""
    if (metric := _BY_NAME.get(name)) is not None:
        return metric, ()
    for pattern, family in _FAMILIES:
        if match := pattern.fullmatch(name):
            return family, tuple(match.groupdict().items())
    return MetricDeclaration(name, "", (), UNDECLARED), ()


def _without_repetition(source: str) -> str:
    """Return a pattern with the words of its kinds, each once: ``env/domain/<domain>/x`` as
    ``env/domain/x``.
    """
    return re.sub(r"(\w+)/<\1>", r"\1", source).replace("<", "").replace(">", "")


def _with_units(name: str) -> tuple[str, float]:
    if name.endswith("gbytes_per_s"):
        return f"{name.removesuffix('gbytes_per_s')}bytes_per_second", GIGA
    if name.endswith("_per_s"):
        return f"{name.removesuffix('_s')}_second", 1.0
    if name.endswith("_s"):
        return f"{name.removesuffix('_s')}_seconds", 1.0
    return (f"{name}_seconds" if name.startswith("time_") else name), 1.0
