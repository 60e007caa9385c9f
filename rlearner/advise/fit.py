"""Fits the model of a run to what its learner wrote: the newest lines of metrics.jsonl, and the
settings. No I/O.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Final

import numpy as np

from learner.reporting.metrics import QUANTILES
from rlearner.advise.run_model import NORMAL, Lengths, RunModel
from rlearner.advise.simulation import simulate

MIN_STEPS: Final = 3  # that a fit needs
MAX_STEPS: Final = 40  # that it uses
FLEET: Final = (
    "fleet/servers",
    "fleet/server_slots",
    "fleet/hubs",
    "fleet/envs",
    "fleet/reward_hubs",
    "fleet/scores",
)
NEEDED: Final = (
    *FLEET[:4], "fleet/token_s", "fleet/token_each_s", "time/step", "time/train", "time/finish_train",
    "time/publish_step", "time/between_steps", "time/generate", "time/env_step", "time/env_step_max", "env/num_turns",
    "perf/samples_per_s", "episode_tokens/mean", "episode_tokens/group_max",
)  # fmt: skip
REWARDS: Final = ("fleet/score_s", "fleet/score_each_s")  # if the run has any
LENGTHS: Final = {f"episode_tokens/{name}": share for name, share in QUANTILES.items()}


class NotFitted(Exception):
    """The lines do not suffice; the text says what is missing. ``steps``: how many more are needed,
    0: unknown.
    """

    def __init__(self, text: str, steps: int = 0) -> None:
        super().__init__(text)
        self.steps = steps


@dataclass(frozen=True)
class FittedRun:
    """A run's model, and how it compares with the run.

    Attributes:
        samples_per_s: measured.
        step_s: measured seconds of a step.
        idle: measured idle shares by stage, where they are measured.
        explained: measured over simulated seconds of a step; predictions are scaled by it.
        steps: the first and the last step that were used.
    """

    model: RunModel
    samples_per_s: float
    step_s: float
    idle: Mapping[str, float]
    explained: float
    steps: tuple[int, int]


def fit(rows: Sequence[Mapping[str, Any]], config: Mapping[str, Any]) -> FittedRun:
    """Fit the model to the newest steps that the present fleet made.

    Args:
        rows: lines of metrics.jsonl, oldest first.
        config: the run's settings, validated.

    Raises:
        NotFitted: if there are too few steps, a figure was not measured, or settings and figures
            make no sense.
    """
    try:
        return _fit(rows, config)
    except (ArithmeticError, RuntimeError, ValueError) as error:
        raise NotFitted(f"settings and figures are not those of a run ({error})") from error


def _fit(rows: Sequence[Mapping[str, Any]], config: Mapping[str, Any]) -> FittedRun:
    used = _usable(rows, config)
    mean = {
        name: fmean(row[name] for row in used)
        for name in used[-1]
        if all(_is_number(row.get(name)) for row in used)
    }
    # a process knows its speed better and better
    mean |= {
        name: value
        for name, value in used[-1].items()
        if name.startswith("fleet/") and _is_number(value)
    }
    model = _model(used, mean, config)
    step_s = mean["time/step"]
    model = replace(model, delay_s=_delay(model, mean["time/generate"], step_s))
    return FittedRun(
        model=model,
        samples_per_s=sum(row["perf/samples_per_s"] * row["time/step"] for row in used)
        / (step_s * len(used)),
        step_s=step_s,
        idle={stage: mean[name] for stage, name in _IDLE.items() if name in mean},
        explained=step_s / simulate(model).step_s,
        steps=(used[0]["step"], used[-1]["step"]),
    )


_IDLE: Final = {"learner": "trainer/idle_ratio", "generation": "rollouter/idle_ratio"}


def _usable(
    rows: Sequence[Mapping[str, Any]], config: Mapping[str, Any]
) -> list[Mapping[str, Any]]:
    """Return the newest rows of the present fleet, without the first steps of the run and its last
    ones.

    Until a step has taken groups of as many versions as it may, and once no more tickets are
    issued, steps are unlike the others.
    """
    staleness = config["train"]["max_staleness"]
    first = staleness + 2
    last = config["train"]["steps"] - staleness - 1
    rows = [row for row in rows if _is_number(row.get("step"))]  # a damaged line may hold none
    if not rows:
        raise NotFitted(f"needs {first + MIN_STEPS} steps", first + MIN_STEPS)
    newest = rows[-1]
    rewards = any(domain["rewards"] for domain in config["domains"].values())
    needed = (*NEEDED, *LENGTHS, *(REWARDS if rewards else ()))
    if missing := [name for name in needed if not _is_number(newest.get(name))]:
        if newest.get("fleet/servers") == 0 or newest.get("fleet/hubs") == 0:
            raise NotFitted("no server or no environment hub was there at the last step")
        raise NotFitted(f"the newest step has no {missing[0]}")
    used: list[Mapping[str, Any]] = []
    for row in reversed(rows):
        same = all(row.get(name) == newest.get(name) for name in FLEET)
        if (
            not same
            or not all(_is_number(row.get(name)) for name in (*NEEDED, *LENGTHS))
            or row["time/step"] <= 0
        ):
            break
        if first < row["step"] <= last:
            used.insert(0, row)
        if len(used) == MAX_STEPS:
            break
    if len(used) < MIN_STEPS:
        more = max(MIN_STEPS - len(used), first + MIN_STEPS - int(newest["step"]))
        if newest["step"] + more > last:
            least = f"{MIN_STEPS} of the present fleet besides its first {first} and its last {staleness + 1}"
            raise NotFitted(f"the run has too few steps: it needs {least}")
        raise NotFitted(f"needs {more} more steps of the present fleet", more)
    return used


def _delay(model: RunModel, generate_s: float, step_s: float) -> float:
    """Return the time of an episode's requests that the servers do not explain, at most what a
    step's time leaves.

    Where servers are the limit, a longer way to them means fewer requests on them, so the way costs
    nothing.
    """
    most = max(0.0, generate_s - simulate(model).generate_s)
    if simulate(replace(model, delay_s=most)).step_s <= step_s:
        return most
    least = 0.0
    for _ in range(5):
        middle = (least + most) / 2
        least, most = (
            (middle, most)
            if simulate(replace(model, delay_s=middle)).step_s <= step_s
            else (least, middle)
        )
    return least


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _model(
    used: Sequence[Mapping[str, Any]], mean: Mapping[str, float], config: Mapping[str, Any]
) -> RunModel:
    train = config["train"]
    groups = config["train"]["groups_per_step"]
    domains = list(config["domains"].values())
    weights = [domain["weight"] for domain in domains]

    def average(key: str) -> float:
        total = sum(weight * domain[key] for weight, domain in zip(weights, domains, strict=True))
        return float(total / sum(weights))

    spare = round(average("group_size_redundancy"))
    greedy = 1 if config["algorithm"]["adv_estimator"] == "remax" else 0
    size = round(average("group_size")) + greedy + spare
    tokens = lengths_of(used, groups * (size - spare)).scaled(mean["episode_tokens/mean"])
    episodes_per_s = groups * size / mean["time/step"]
    servers = max(1.0, mean["fleet/servers"])
    hubs = max(1.0, mean["fleet/hubs"])
    reward_hubs = max(1.0, mean.get("fleet/reward_hubs", 0.0))
    rewards = max((len(domain["rewards"]) for domain in domains), default=0)
    slowed = _alone(mean, "env_call", episodes_per_s * mean["time/env_step"] / hubs)
    kept = groups / (groups + mean.get("filter/count", 0.0))
    return RunModel(
        groups_per_step=groups,
        group_size=size,
        redundancy=spare,
        max_staleness=train["max_staleness"],
        tokens=tokens,
        alike=_alike(tokens, size - spare, mean["episode_tokens/group_max"]),
        drops_late=train["on_late"] == "drop",
        turns=mean["env/num_turns"],
        kept=kept,
        servers=servers,
        slots=max(1, round(mean["fleet/server_slots"] / servers)),
        token_s=mean["fleet/token_s"],
        token_each_s=mean["fleet/token_each_s"],
        hubs=hubs,
        envs=max(1, round(mean["fleet/envs"] / hubs)),
        env_s=mean["time/env_step"] * slowed[0],
        env_each_s=mean["time/env_step"] * slowed[1],
        env_spread=_spread(size - spare, mean["time/env_step"], mean["time/env_step_max"]),
        reward_hubs=reward_hubs,
        workers=max(1, round(mean.get("fleet/scores", 1.0) / reward_hubs)),
        score_s=rewards * mean["fleet/score_s"] if rewards else 0.0,
        score_each_s=rewards * mean["fleet/score_each_s"] if rewards else 0.0,
        scores_early=any(domain.get("score_ahead") for domain in domains),
        group_s=max(0.0, mean["time/train"] - mean["time/finish_train"]) / groups,
        step_s=mean["time/finish_train"] + mean["time/publish_step"],
        rest_s=mean["time/between_steps"],
    )


def lengths_of(used: Sequence[Mapping[str, Any]], num: int) -> Lengths:
    """Return the distribution behind the quantiles of several steps.

    A quantile of ``num`` samples is one of them, or between two; the score of the i-th of them is
    at its median rank.
    """
    points: dict[float, float] = {}
    for name, share in LENGTHS.items():
        rank = (share * (num - 1) + 0.7) / (num + 0.4)
        points[NORMAL.inv_cdf(rank)] = math.exp(
            fmean(math.log(max(0.5, row[name])) for row in used)
        )
    return Lengths(tuple(points.items()), max(row["episode_tokens/max"] for row in used))


def _alone(mean: Mapping[str, float], work: str, at_once: float) -> tuple[float, float]:
    """Return the shares of a measured time that a call takes alone, and that each of those at once
    adds.
    """
    base = mean.get(f"fleet/{work}_s", 0.0)
    each = mean.get(f"fleet/{work}_each_s", 0.0)
    total = base + each * max(1.0, at_once)
    return (base / total, each / total) if total > 0 else (1.0, 0.0)


def _table(size: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    rng = np.random.default_rng(1)
    return rng.standard_normal((256, 1)), rng.standard_normal((256, size))


def _alike(tokens: Lengths, size: int, longest: float) -> float:
    """Return the correlation of lengths with which the longest of a group has this mean: the lower,
    the longer.
    """
    group, own = _table(size)
    grid = np.linspace(0.0, 0.95, 20)
    found = [
        tokens.at(math.sqrt(alike) * group + math.sqrt(1 - alike) * own).max(axis=1).mean()
        for alike in grid
    ]
    return float(np.interp(-longest, -np.array(found), grid))


def _spread(size: int, mean: float, longest: float) -> float:
    """Return the standard deviation of the logarithm with which the longest of a group has this
    mean.
    """
    if mean <= 0 or size < 2:
        return 0.0
    _, own = _table(size)
    grid = np.linspace(0.0, 2.0, 41)
    found = [
        float(np.exp(spread * own - spread * spread / 2).max(axis=1).mean()) for spread in grid
    ]
    return float(np.interp(longest / mean, np.maximum.accumulate(found), grid))
