"""Charts of an overview appear with their values, in the order of a later visit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import pytest

pytest.importorskip("nicegui")

from nicegui import Client
from nicegui.element import Element
from nicegui.page import page

from rlearner.console.components import tag
from rlearner.console.index.answers import EvaluationResult, Series
from rlearner.console.pages.curves import (
    LAYOUTS,
    CurveBoard,
    clock_points,
    curve_points,
    metric_series,
)
from rlearner.console.pages.evaluation import evaluation_series, result_table
from rlearner.console.pages.runs import choose_metric


@contextmanager
def open_page() -> Iterator[Element]:
    """An element of a page that has a first chart already."""
    with Client(page("/board"), request=None), tag("div") as container:
        tag("section")
        yield container


def lines_of(names: Iterable[str]) -> dict[str, Series]:
    return {name: Series(name, [1], [0.0], [1.0], 1) for name in names}


def make_board(container: Element, names: Iterable[str]) -> CurveBoard:
    layout = LAYOUTS["training"]
    return CurveBoard(container, layout.curves, layout.always, lines=lines_of(names), marks=[])


def titles(container: Element) -> list[str]:
    panels = container.default_slot.children[1:]
    return [panel.default_slot.children[0]._props["title"] for panel in panels]


async def test_charts_appear_with_their_first_values() -> None:
    with open_page() as container:
        board = make_board(container, [])
        assert titles(container) == ["Reward", "Success rate"]
        board.show(lines_of(["actor/entropy", "staleness/max"]), [])
        assert titles(container) == [
            "Reward",
            "Success rate",
            "Staleness in versions",
            "Entropy and gradient norm",
        ]
        board.show(lines_of(LAYOUTS["training"].metrics), [])
        assert titles(container) == [curve.title for curve in LAYOUTS["training"].curves]
        assert board.names == LAYOUTS["training"].metrics


async def test_lines_appear_on_a_chart_that_is_there() -> None:
    with open_page() as container:
        board = make_board(container, ["reward/mean"])
        assert board.names == {"reward/mean", "env/success_rate"}
        board.show(lines_of(["reward/mean", "reward/max"]), [])
    assert board.names == {"reward/mean", "reward/max", "env/success_rate"}


def test_points_of_curves_and_of_the_clock() -> None:
    whole = Series("a", [1, 2], [5.0, 6.0], [0.123456789, 1.0], 2)
    assert curve_points(whole) == {"x": [1, 2], "y": [0.123457, 1.0]}
    sampled = Series("a", [1, 90], [5.0, 6.0], [0.0, 1.0], 100, [0.25, 0.25])
    assert curve_points(sampled) == {"x": [1, 90], "y": [0.0, 1.0], "means": [0.25, 0.25]}
    assert metric_series(("a", "b"), {"a": whole})[1] == {"name": "b", "x": [], "y": []}
    times = Series("time", [1, 2], [0.0, 0.0], [1780000000.123, 1780000009.98], 2)
    assert clock_points({"time": times}) == {"x": [1, 2], "y": [1780000000.1, 1780000010.0]}
    assert clock_points({}) == {"x": [], "y": []}


@pytest.mark.parametrize(
    ("wanted", "common", "metric"),
    [
        ("", {"reward/mean", "train/loss"}, "reward/mean"),
        ("actor/entropy", {"reward/mean", "actor/entropy"}, "actor/entropy"),
        ("reward/mean", {"train/loss", "perf/tokens_per_s"}, "train/loss"),
        ("train/loss", {"perf/tokens_per_s", "a"}, "perf/tokens_per_s"),
        ("train/loss", {"b", "a"}, "a"),
        ("train/loss", set(), ""),
    ],
)
def test_compared_metric_is_one_of_all_runs(wanted: str, common: set[str], metric: str) -> None:
    assert choose_metric(wanted, common) == metric


def test_rates_of_an_evaluation_by_domain() -> None:
    values = {
        "success_rate": 0.5,
        "success_interval": [0.4, 0.6],
        "reward_mean": 0.25,
        "tasks": 8,
        "episodes": 16,
        "pass@2": 0.75,
    }
    columns, rows = result_table({**values, "domains": {"lake": values, "sea": values}})
    assert [column["title"] for column in columns] == [
        "domain",
        "success",
        "95 % interval",
        "pass@2",
        "reward",
        "tasks",
        "episodes",
    ]
    assert [row["part"] for row in rows] == ["all", "lake", "sea"]
    assert rows[0] == {
        "key": "all",
        "part": "all",
        "success_rate": 0.5,
        "interval": "0.400 – 0.600",
        "pass@2": 0.75,
        "reward_mean": 0.25,
        "tasks": 8,
        "episodes": 16,
    }
    assert len(result_table({**values, "domains": {"lake": values}})[1]) == 1
    assert result_table({})[1] == []


def test_each_domain_of_an_evaluation_is_a_curve() -> None:
    def result(step: int, policy: str, **by_domain: float) -> EvaluationResult:
        rate = sum(by_domain.values()) / len(by_domain)
        return EvaluationResult(
            step, policy, 0.0, tasks=4, episodes=4, success_rate=rate, low=rate - 0.1,
            high=rate + 0.1, reward_mean=0.0, by_domain=by_domain,
        )  # fmt: skip

    results = [
        result(0, "actor", lake=0.25, sokoban=0.25),
        result(0, "random", lake=0.125),
        result(10, "actor", lake=0.75, sokoban=0.5),
    ]
    first, lake, sokoban, random = evaluation_series(results)
    assert (first["name"], first["x"], first["y"]) == ("actor", [0, 10], [0.25, 0.625])
    assert first["high"] == [0.35, 0.725]
    assert lake == {"name": "actor, lake", "x": [0, 10], "y": [0.25, 0.75], "dots": True}
    assert sokoban == {"name": "actor, sokoban", "x": [0, 10], "y": [0.25, 0.5], "dots": True}
    assert (random["name"], random["x"], random["y"]) == ("random", [0], [0.125])
