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

from broker.telemetry.catalogue import match_metric

PREFIX: Final = "rlearner_"
GIGA: Final = 1e9

NOT_FIGURES: Final = frozenset({"time"})  # when a line was written
# A hub that is not ours may report names of its own.
UNDECLARED: Final = "A metric that is not declared"


@dataclass(frozen=True)
class PrometheusName:
    """The name of a metric in Prometheus.

    Attributes:
        name: of the family, without the ``_total`` of a counter.
        labels: pairs of name and value.
        is_counter: whether the value only grows while a process lives.
        scale: factor from the metric's unit to the base unit.
        source: its name, or that of its family, as declared.
        meaning: as declared.
    """

    name: str
    labels: tuple[tuple[str, str], ...]
    is_counter: bool
    scale: float
    source: str
    meaning: str

    @property
    def sample(self) -> str:
        """Name of the series."""
        return f"{self.name}_total" if self.is_counter else self.name


_INVALID: Final = re.compile(r"[^a-zA-Z0-9_]")


@lru_cache(maxsize=4096)
def prometheus_name(metric: str) -> PrometheusName:
    """Return the name in Prometheus of a metric such as ``reward/lake/mean``."""
    declaration, labels = match_metric(metric)
    source = declaration.name if declaration is not None and labels else metric
    name, scale = _with_units(_INVALID.sub("_", _without_repetition(source)))
    return PrometheusName(
        PREFIX + name,
        labels,
        is_counter=declaration is not None and declaration.kind == "counter",
        scale=scale,
        source=source,
        meaning=UNDECLARED if declaration is None else declaration.meaning,
    )


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
