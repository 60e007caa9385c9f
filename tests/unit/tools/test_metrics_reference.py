"""docs/metrics-reference.md is up to date and names every declared metric."""

from __future__ import annotations

from broker.telemetry.page_metrics import PAGE_METRICS
from broker.telemetry.run_metrics import RUN_METRICS
from tools.metrics_reference import TARGET, render_reference


def test_page_is_that_of_the_declarations() -> None:
    text = TARGET.read_text(encoding="utf-8")
    assert text == render_reference(), "run `python -m tools.metrics_reference`"


def test_each_declared_metric_has_a_row() -> None:
    rows = render_reference().splitlines()
    names = {row.split("`")[1] for row in rows if row.startswith("| `")}
    assert {metric.name for metric in RUN_METRICS} <= names
    assert len(names) == len(RUN_METRICS) + len(PAGE_METRICS)
