"""Charts and tiles of a run's overview, by the kind of the run."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from nicegui.element import Element

from broker.telemetry.names import find_metric
from rlearner.console.components import Chart, tag
from rlearner.console.index.answers import Series
from rlearner.ops.run_kinds import RunKind

SHARE: Final = {"low": 0, "high": 1}
CLOCK: Final = "time"  # metric: when a step's line was written


@dataclass(frozen=True)
class Curve:
    """A chart: its title, the metrics on it, and the bounds of its axis."""

    title: str
    names: tuple[str, ...]
    bounds: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of_first(cls, *names: str, **bounds: float) -> Curve:
        """Return a chart with the title of its first metric."""
        return cls(find_metric(names[0]).heading, names, bounds)


@dataclass(frozen=True)
class OverviewLayout:
    """What the overview of a kind of run shows.

    Attributes:
        always: metrics, each the first of its chart, whose chart is shown before it has values.
        has_evaluations: whether the chart of evaluated episodes is shown.
    """

    curves: tuple[Curve, ...]
    tiles: tuple[str, ...]
    always: Collection[str] = ()
    has_evaluations: bool = False

    @property
    def metrics(self) -> set[str]:
        """Names of all metrics on the charts."""
        return {name for curve in self.curves for name in curve.names}


SPEED: Final = Curve.of_first("perf/tokens_per_s", low=0)
TRAINING: Final = OverviewLayout(
    curves=(
        Curve.of_first("reward/mean", "reward/max", "reward/min"),
        Curve.of_first("env/success_rate", "env/valid_action_rate", **SHARE),
        Curve.of_first("staleness/mean", "staleness/max", low=0),
        Curve("Idle share", ("trainer/idle_ratio", "rollouter/idle_ratio"), SHARE),
        SPEED,
        Curve(
            "Seconds of a step",
            ("time/wait_for_batch", "time/train", "time/offer_weights"),
            {"low": 0},
        ),
        Curve("Loss and KL", ("actor/pg_loss", "actor/ppo_kl", "critic/vf_loss")),
        Curve("Entropy and gradient norm", ("actor/entropy", "actor/grad_norm")),
        Curve.of_first("response_length/mean", "response_length/max", low=0),
    ),
    tiles=(
        "reward/mean",
        "env/success_rate",
        "staleness/max",
        "trainer/idle_ratio",
        "rollouter/idle_ratio",
        "perf/tokens_per_s",
        "actor/entropy",
    ),
    always=("reward/mean", "env/success_rate"),
    has_evaluations=True,
)
EVALUATION: Final = OverviewLayout(curves=(), tiles=())
LOSS: Final = Curve.of_first("train/loss", "eval/loss")
OF_DATA: Final = (
    Curve.of_first("train/grad_norm", low=0),
    Curve.of_first("train/lr", low=0),
    SPEED,
    Curve("Tokens of a step", ("train/tokens", "train/trained_tokens"), {"low": 0}),
    Curve("Seconds of a step", ("time/step",), {"low": 0}),
)
OF_PAIRS: Final = (
    Curve.of_first("train/accuracy", "eval/accuracy", **SHARE),
    Curve.of_first("train/reward_margin", "eval/reward_margin"),
    Curve(
        "Rewards of the pairs",
        (
            "train/chosen_reward",
            "train/rejected_reward",
            "eval/chosen_reward",
            "eval/rejected_reward",
        ),
    ),
)
PAIRS: Final = OverviewLayout(
    curves=(LOSS, *OF_PAIRS, *OF_DATA),
    tiles=(
        "train/loss",
        "eval/loss",
        "train/accuracy",
        "eval/accuracy",
        "train/lr",
        "perf/tokens_per_s",
    ),
    always=("train/loss",),
)
LAYOUTS: Final[Mapping[RunKind, OverviewLayout]] = {
    "training": TRAINING,
    "evaluation": EVALUATION,
    "sft": OverviewLayout(
        curves=(LOSS, Curve.of_first("eval/perplexity"), *OF_DATA),
        tiles=("train/loss", "eval/loss", "eval/perplexity", "train/lr", "perf/tokens_per_s"),
        always=("train/loss",),
    ),
    "dpo": PAIRS,
    "rm": PAIRS,
    "distill": OverviewLayout(
        curves=(LOSS, *OF_DATA),
        tiles=("train/loss", "eval/loss", "train/lr", "perf/tokens_per_s"),
        always=("train/loss",),
    ),
}


class CurveBoard:
    """The curves of an overview. A chart, and a line on it, appear with their first value.

    Args:
        container: of the charts, which follow those that it has.
        curves: those that may be shown, in this order.
        always: as in ``OverviewLayout``.
        lines: values so far, by metric.
        marks: events on the axes.
    """

    def __init__(
        self,
        container: Element,
        curves: tuple[Curve, ...],
        always: Collection[str],
        *,
        lines: Mapping[str, Series],
        marks: list[dict[str, Any]],
    ) -> None:
        self._container = container
        self._curves = curves
        self._always = always
        self._first = len(container.default_slot.children)
        self._charts: dict[int, Chart] = {}
        self._names: dict[int, tuple[str, ...]] = {}
        self.show(lines, marks)

    @property
    def names(self) -> set[str]:
        """Metrics that are shown."""
        return {name for names in self._names.values() for name in names}

    def show(self, lines: Mapping[str, Series], marks: list[dict[str, Any]]) -> None:
        """Show these values, which are all, in charts that are there or now have values."""
        for place, curve in enumerate(self._curves):
            names = tuple(name for name in curve.names if name in lines)
            if not names and curve.names[0] not in self._always and place not in self._charts:
                continue
            self._names[place] = names or curve.names[:1]
            series = metric_series(self._names[place], lines)
            if place in self._charts:
                self._charts[place].run_method("set", series)
            else:
                self._add_chart(place, curve, series, marks)

    def mark(self, marks: list[dict[str, Any]]) -> None:
        """Give every chart of the page these marks, in one message."""
        if self._charts:
            next(iter(self._charts.values())).tell_all("marks", marks)

    def _add_chart(
        self, place: int, curve: Curve, series: list[dict[str, Any]], marks: list[dict[str, Any]]
    ) -> None:
        index = self._first + sum(other < place for other in self._charts)
        with self._container:
            panel = tag("section", classes="panel")
            with panel:
                self._charts[place] = Chart(
                    curve.title, series, marks, arranged=True, **curve.bounds
                )
        if index < len(self._container.default_slot.children) - 1:
            panel.move(target_index=index)


def metric_series(names: tuple[str, ...], lines: Mapping[str, Series]) -> list[dict[str, Any]]:
    """Return curves as ``chart.js`` takes them."""
    return [
        {"name": name} | curve_points(lines[name])
        if name in lines
        else {"name": name, "x": [], "y": []}
        for name in names
    ]


def curve_points(line: Series) -> dict[str, Any]:
    """Return a metric's points, with the means of their ranges if the curve is sampled."""
    points = {"x": line.steps, "y": round_values(line.values)}
    return points | ({"means": round_values(line.means)} if line.means else {})


def clock_points(lines: Mapping[str, Series]) -> dict[str, list[float]]:
    """Return steps and when their lines were written, from the metric ``time``."""
    line = lines.get(CLOCK)
    return {"x": list(line.steps), "y": round_times(line.values)} if line else {"x": [], "y": []}


def round_values(values: list[float]) -> list[float]:
    """Return values with the digits that a chart can show."""
    return [float(f"{value:.6g}") for value in values]


def round_times(times: list[float]) -> list[float]:
    """Return times in tenths of a second."""
    return [round(time, 1) for time in times]
