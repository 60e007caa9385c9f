"""Collects samples into the families of prometheus-client, with the labels of the process that they
come from.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from typing import Final

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from broker.telemetry.names import NOT_FIGURES, PREFIX, prometheus_name
from broker.telemetry.page_metrics import PAGE_METRICS

log = logging.getLogger(__name__)

# by rlearner_queue_depth, which names the subject
SUPERSEDED: Final = frozenset({"rlearner_queue_stream_depth"})
_reported_names: set[str] = set()  # names that were reported as ambiguous


class Families:
    """Metric families under construction; all samples of a family have the same labels."""

    def __init__(self) -> None:
        self._families: dict[str, Metric] = {}
        self._labels: dict[str, tuple[str, ...]] = {}
        self._seen: set[tuple[str, tuple[str, ...]]] = set()

    def all(self) -> Iterable[Metric]:
        """Return the families, ordered by name."""
        return [self._families[name] for name in sorted(self._families)]

    def add(self, name: str, labels: Mapping[str, str], value: float) -> None:
        """Add a sample of a metric in ``broker.telemetry.page_metrics``.

        Raises:
            KeyError: if it is not declared there.
        """
        metric = PAGE_METRICS[name]
        self._add(
            f"{PREFIX}{name}", metric.meaning, labels, value, is_counter=metric.kind == "counter"
        )

    def metrics(self, values: Mapping[str, float], labels: Mapping[str, str]) -> None:
        """Add the metrics that a process reported; see ``broker.telemetry.names``."""
        for metric in sorted(values):
            value = values[metric]
            if metric in NOT_FIGURES or not math.isfinite(value):
                continue
            family_name = prometheus_name(metric)
            if family_name.name in SUPERSEDED:
                continue
            declaration = family_name.metric
            self._add(
                family_name.name,
                f"{declaration.meaning} ({declaration.name})",
                {**labels, **dict(family_name.labels)},
                value * family_name.scale,
                is_counter=declaration.kind == "counter",
            )

    def _add(
        self, name: str, text: str, labels: Mapping[str, str], value: float, *, is_counter: bool
    ) -> None:
        family = self._families.get(name)
        if family is None:
            kind = CounterMetricFamily if is_counter else GaugeMetricFamily
            self._labels[name] = tuple(labels)
            family = self._families[name] = kind(name, text, labels=self._labels[name])
        label_values = tuple(labels.values())
        is_other = (
            tuple(labels) != self._labels[name]
            or isinstance(family, CounterMetricFamily) != is_counter
        )
        # two names of a user's that differ in "." and "_", for example
        if is_other or (name, label_values) in self._seen:
            if name not in _reported_names and len(_reported_names) < 100:
                _reported_names.add(name)
                log.warning(
                    "several metrics are called %s in Prometheus; one of them is shown", name
                )
            return
        self._seen.add((name, label_values))
        assert isinstance(family, CounterMetricFamily | GaugeMetricFamily)
        family.add_metric(label_values, value)
