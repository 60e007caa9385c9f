"""Compares metrics that processes report, or their pages show, with the declarations."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.metrics_core import Metric

from broker.telemetry.names import PREFIX, UNDECLARED, prometheus_name
from broker.telemetry.page_metrics import PAGE_METRICS


def undeclared(names: Iterable[str]) -> set[str]:
    """Return the names of reported metrics that no declaration covers."""
    return {name for name in names if prometheus_name(name).metric.meaning == UNDECLARED}


def differences(page: Iterable[Metric]) -> list[str]:
    """Return the families of a page that are not as declared: name, labels or kind."""
    lines = []
    for family in page:
        metric = PAGE_METRICS.get(family.name.removeprefix(PREFIX))
        if family.documentation.startswith(UNDECLARED):
            lines.append(f"{family.name}: not declared")
        elif family.name.startswith(PREFIX) and metric is not None:
            labels = {name for sample in family.samples for name in sample.labels} - {"le", "run"}
            if labels != set(metric.labels) or family.type != metric.kind:
                lines.append(f"{family.name}: {family.type} with {sorted(labels)}")
    return lines
