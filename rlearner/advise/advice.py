"""What limits a run, and what would change it by how much, from its fitted model. No I/O."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Literal

from broker.settings.run_settings import RunSettings
from rlearner.advise.changes import KEYS, apply_changes, usual_changes
from rlearner.advise.fit import FittedRun, HostUse, NotFitted, fit_run
from rlearner.advise.run_model import STAGES, RunModel, Stage
from rlearner.advise.simulation import simulate

log = logging.getLogger(__name__)

# Share of the samples/s that any number of servers reaches; more servers are not worth their cost.
ENOUGH: Final = 0.95
# Gain from which a change is named.
WORTH: Final = 0.03
# Gain of a relieved stage from which it is called the bottleneck.
CLEAR: Final = 0.05
MOST_SERVERS: Final = 4096
# Outside these bounds of measured over simulated time, no gains are predicted.
ROUGH: Final = (0.75, 1.33)
# Share of a host's processors in use from which it is full: the rest is lost between two processes
# that wait for each other.
FULL: Final = 0.9
# Share of filtered groups from which a full machine's line names them.
WASTE: Final = 0.2
# Keys of changes that add processes.
PROCESSES: Final = frozenset({"servers", "hubs", "reward_hubs"})


@dataclass(frozen=True)
class Change:
    """One change with its prediction; ``gain`` is the relative change of samples/s."""

    changes: Mapping[str, float]
    text: str
    samples_per_s: float
    gain: float


@dataclass(frozen=True)
class Advice:
    """The answer for one run."""

    # None: no stage stands out; machine: the only host is full
    bottleneck: Stage | Literal["machine"] | None
    # relative gain if the stage were twice as fast, as large or as patient
    relief: Mapping[Stage, float]
    changes: Sequence[Change]  # the largest gain first
    busy: Mapping[str, float]  # share of each stage's capacity that is in use, in the simulated run
    samples_per_s: float  # measured
    explained: float
    step_s: float  # measured
    steps: tuple[int, int]
    now: Mapping[str, float]  # by key of a change
    filtered: str = ""  # how many groups of a step, and why
    filtered_share: float = 0.0
    host: HostUse | None = None

    @property
    def is_rough(self) -> bool:
        """Whether the model explains the run too badly for predictions."""
        return not ROUGH[0] <= self.explained <= ROUGH[1]

    @property
    def line(self) -> str:
        """The bottleneck and what would change it, in one line."""
        if self.bottleneck == "machine" and self.host is not None:
            waste = ""
            if self.filtered_share >= WASTE:
                waste = f", or fewer filtered groups: {self.filtered}"
            return (
                f"machine; this machine is full: {describe_host(self.host)}, so more processes "
                f"on it, or a larger max_staleness, add nothing; another host helps{waste}"
            )
        line = "none stands out"
        if self.bottleneck is not None:
            line = str(self.bottleneck)
        if self.bottleneck == "filtering":
            line = (
                f"filtering; {self.filtered} and were replaced: easier or harder tasks, or larger "
                "groups, waste fewer"
            )
        if self.is_rough:
            return (
                f"{line}; no gains are predicted: a step takes {self.step_s:.3g} s, in the model "
                f"{self.step_s / self.explained:.3g} s"
            )
        if self.bottleneck is None:
            return f"{line}: no stage alone would add 5 % if it were twice as fast"
        best: dict[str, Change] = {}
        for change in self.changes:
            best.setdefault(next(iter(change.changes)), change)
        gains = [
            f"{change.text}: {change.gain:+.0%}".replace("%", " %")
            for change in best.values()
            if change.gain >= WORTH
        ]
        if gains:
            line = "; or ".join([f"{line}; {gains[0]} samples/s", *gains[1:2]])
        return line

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON-able values."""
        return asdict(self) | {"line": self.line}


def advise(rows: Sequence[Mapping[str, Any]], settings: RunSettings) -> Advice:
    """Return the advice for a run.

    Args:
        rows: lines of metrics.jsonl, oldest first.
        settings: of the run.

    Raises:
        NotFitted: if there are too few steps, or a figure was not measured.
    """
    return advice_of(fit_run(rows, settings))


def advice_of(run: FittedRun) -> Advice:
    """Return the advice for a fitted run."""
    base = simulate(run.model)
    relief = {stage: _relieved_rate(run.model, stage) / base.samples_per_s - 1 for stage in STAGES}
    stage = max(STAGES, key=relief.__getitem__)
    changes = [
        _place_change(run, predict_change(run, changes, text))
        for changes, text in usual_changes(run.model)
    ]
    bottleneck: Stage | Literal["machine"] | None = stage if relief[stage] >= CLEAR else None
    busy = dict(base.busy)
    if run.host is not None:
        busy["machine"] = run.host.busy
        if is_full(run.host) and run.host.is_only_host:
            bottleneck = "machine"
    return Advice(
        bottleneck=bottleneck,
        relief=relief,
        changes=sorted(changes, key=lambda change: -change.gain),
        busy=busy,
        samples_per_s=run.samples_per_s,
        explained=run.explained,
        step_s=run.step_s,
        steps=run.steps,
        now={name: key.now(run.model) for name, key in KEYS.items()},
        filtered=_describe_filtered(run),
        filtered_share=1 - run.model.kept,
        host=run.host,
    )


def is_full(host: HostUse) -> bool:
    """Return whether a host has no room for further processes."""
    return host.busy >= FULL


def describe_host(host: HostUse) -> str:
    """Return how much of a host is in use, in words."""
    cores = f"its {host.cores:g} cores are"
    if host.cores == 1:
        cores = "its only core is"
    return f"{cores} {host.busy:.0%} busy".replace("%", " %")


def _describe_filtered(run: FittedRun) -> str:
    filtered = round(run.filtered)
    num_groups = filtered + run.model.groups_per_step
    return f"{filtered} of {num_groups} groups of a step {run.filter_reason}"


def _place_change(run: FittedRun, change: Change) -> Change:
    """Return the change with a gain for which the run's only host has room, or for another host.

    More processes or tickets put idle cores to work, but each sample costs as much as before.
    """
    host = run.host
    if host is None or "learner" in change.changes:
        return change
    if host.is_only_host:
        gain = min(change.gain, 1 / max(host.busy, 1e-3) - 1)
        return replace(change, gain=gain, samples_per_s=run.samples_per_s * (1 + gain))
    if is_full(host) and PROCESSES & change.changes.keys():
        return replace(change, text=f"{change.text}, not on the learner's host")
    return change


def _relieved_rate(model: RunModel, stage: Stage) -> float:
    """Return the samples/s with one stage relieved, at least those without."""
    return max(simulate(model).samples_per_s, simulate(model.relieved(stage)).samples_per_s)


def predict_change(run: FittedRun, changes: Mapping[str, float], text: str = "") -> Change:
    """Predict the samples/s after changes: the measured rate times the simulated gain."""
    gain = samples_per_s(apply_changes(run.model, changes)) / samples_per_s(run.model) - 1
    return Change(changes, text, run.samples_per_s * (1 + gain), gain)


def samples_per_s(model: RunModel) -> float:
    """Return simulated samples/s that never fall with more servers.

    A simulated schedule may by chance be a little worse with one more server. So numbers of a grid
    are simulated, each counts at least as much as those below it, and the rest is interpolated.
    """
    low = _grid_below(model.servers)
    if low == model.servers:
        return _rate_on_grid(model, low)
    high = _grid_above(low)
    share = (model.servers - low) / (high - low)
    return (1 - share) * _rate_on_grid(model, low) + share * _rate_on_grid(model, high)


def _grid_below(servers: float) -> int:
    """Return the largest point of the grid 1, 2, …, 8, 10, 12, 14, 16, 20, … up to ``servers``."""
    whole = max(1, int(servers))
    if whole <= 8:
        return whole
    step = 1 << (whole.bit_length() - 3)
    return whole // step * step


def _grid_above(point: int) -> int:
    if point < 8:
        return point + 1
    return point + (1 << (point.bit_length() - 3))


def _rate_on_grid(model: RunModel, servers: int) -> float:
    best = 0.0
    point = servers
    while point >= 1:
        rate = simulate(replace(model, servers=float(point))).samples_per_s
        # The noise of a schedule is far smaller than this, so no lower point can be better.
        if rate < 0.8 * best:
            break
        best = max(best, rate)
        point = _grid_below(point - 1) if point > 1 else 0
    return best


def desired_servers(model: RunModel) -> int:
    """Return the fewest servers with 95 % of the samples/s that any number of them reaches."""
    most = max(samples_per_s(replace(model, servers=float(MOST_SERVERS))), samples_per_s(model))
    low = 0
    high = MOST_SERVERS
    while high - low > 1:
        middle = (low + high) // 2
        if samples_per_s(replace(model, servers=float(middle))) >= ENOUGH * most:
            high = middle
        else:
            low = middle
    return high


def bottleneck_line(rows: Sequence[Mapping[str, Any]], settings: RunSettings) -> str:
    """Return the bottleneck in one line, or what is missing to name it."""
    try:
        return advise(rows, settings).line
    except NotFitted as error:
        return f"not known: {error}"
    except Exception as error:
        # The live view prints this line: an error in the advice must not end the run.
        log.exception("no advice from these steps")
        return f"not known: {type(error).__name__}"
