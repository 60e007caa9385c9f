"""Fits the model of a run to its settings and the newest lines of metrics.jsonl. No I/O."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Final

import numpy as np
from pydantic import ValidationError

from broker.contract.wire import PlainSettings
from broker.settings.config import num_greedy
from broker.settings.run_settings import RunSettings, stored_value
from broker.settings.schema.algorithm import AlgorithmSection
from broker.settings.sections import first_problem
from learner.algorithm.selection import num_kept
from learner.reporting.metrics import QUANTILES
from rlearner.advise.run_model import NORMAL, Lengths, RunModel
from rlearner.advise.simulation import simulate

# Steps that a fit needs, and the most that it uses.
MIN_STEPS: Final = 3
# Older steps are of an older policy, whose episodes may have had other lengths.
MAX_STEPS: Final = 40
FLEET: Final = (
    "fleet/servers",
    "fleet/server_slots",
    "fleet/hubs",
    "fleet/envs",
    "fleet/reward_hubs",
    "fleet/scores",
)
# The figures without which nothing is fitted.
NEEDED: Final = (
    *FLEET[:4], "fleet/token_s", "fleet/token_each_s", "time/step", "time/train",
    "time/finish_train", "time/publish_step", "time/between_steps", "time/generate",
    "time/env_step", "time/env_step_max", "env/num_turns", "perf/samples_per_s",
    "episode_tokens/mean", "episode_tokens/group_max",
)  # fmt: skip
# Needed too if the run has rewards.
REWARDS: Final = ("fleet/score_s", "fleet/score_each_s")
LENGTHS: Final = {f"episode_tokens/{name}": share for name, share in QUANTILES.items()}


# Sections of the settings that a fit reads.
SECTIONS: Final = ("train", "domains", "algorithm")
# Without these of ``train`` a folder is damaged, or of a version whose steps were others.
TRAIN_SETTINGS: Final = ("steps", "groups_per_step", "max_staleness")


class NotFitted(Exception):
    """The lines do not suffice; the text says what is missing. ``steps``: how many more are needed,
    0: unknown.
    """

    def __init__(self, text: str, steps: int = 0) -> None:
        super().__init__(text)
        self.steps = steps


@dataclass(frozen=True)
class HostUse:
    """How much of the learner's host is in use.

    Attributes:
        cores: its processor cores.
        busy: share of them in use, by all processes.
        is_only_host: whether all servers and hubs are on it too.
    """

    cores: float
    busy: float
    is_only_host: bool


@dataclass(frozen=True)
class FittedRun:
    """A run's model, and how it compares with the run.

    Attributes:
        samples_per_s: measured.
        step_s: measured seconds of a step.
        idle: measured idle shares by stage, where they are measured.
        explained: measured over simulated seconds of a step; predictions are scaled by it.
        steps: the first and the last step that were used.
        filtered: groups that a step filters and replaces; ``filter_reason`` says why.
        host: None if it was not measured.
    """

    model: RunModel
    samples_per_s: float
    step_s: float
    idle: Mapping[str, float]
    explained: float
    steps: tuple[int, int]
    filtered: float = 0.0
    filter_reason: str = ""
    host: HostUse | None = None


class SettingMissing(Exception):
    """A run's folder lacks a setting; the text names it."""


def stored_settings(config: PlainSettings) -> RunSettings:
    """Return the settings that a fit reads, from a run's folder.

    Raises:
        SettingMissing: if it lacks one of them.
        NotFitted: if a value is not allowed.
    """
    for name in SECTIONS:
        if name not in config:
            raise SettingMissing(repr(name))
    for name in TRAIN_SETTINGS:
        if stored_value(config, "train", name) is None:
            raise SettingMissing(repr(name))
    try:
        return RunSettings.of_config({name: config[name] for name in SECTIONS})
    except ValidationError as error:
        raise _not_those_of_a_run(first_problem(error)) from None


def _not_those_of_a_run(problem: object) -> NotFitted:
    return NotFitted(f"settings and figures are not those of a run ({problem})")


def fit_run(rows: Sequence[Mapping[str, Any]], settings: RunSettings) -> FittedRun:
    """Fit the model to the newest steps that the present fleet made.

    Args:
        rows: lines of metrics.jsonl, oldest first.
        settings: of the run.

    Raises:
        NotFitted: if there are too few steps, a figure was not measured, or settings and figures
            make no sense.
    """
    try:
        return _fit_model(rows, settings)
    except (ArithmeticError, RuntimeError, ValueError) as error:
        raise _not_those_of_a_run(error) from error


def _fit_model(rows: Sequence[Mapping[str, Any]], settings: RunSettings) -> FittedRun:
    steps = _usable_rows(rows, settings)
    mean = {
        name: fmean(row[name] for row in steps)
        for name in steps[-1]
        if all(_is_number(row.get(name)) for row in steps)
    }
    # A process measures its own speed over its whole life, so its newest figure is the best.
    mean |= {
        name: value
        for name, value in steps[-1].items()
        if name.startswith("fleet/") and _is_number(value)
    }
    filtered = _filtered_groups(mean, settings)
    model = _build_model(steps, mean, settings, filtered)
    step_s = mean["time/step"]
    model = replace(model, delay_s=_request_delay(model, mean["time/generate"], step_s))
    return FittedRun(
        model=model,
        samples_per_s=sum(row["perf/samples_per_s"] * row["time/step"] for row in steps)
        / (step_s * len(steps)),
        step_s=step_s,
        idle={stage: mean[name] for stage, name in _IDLE.items() if name in mean},
        explained=step_s / simulate(model).step_s,
        steps=(steps[0]["step"], steps[-1]["step"]),
        filtered=filtered,
        filter_reason=_filter_reason(settings.algorithm),
        host=_host_use(mean),
    )


def _filtered_groups(mean: Mapping[str, float], settings: RunSettings) -> float:
    """Return the groups that a step filters, without those that nothing replaces."""
    groups = settings.train.groups_per_step
    unselected = 0
    if settings.algorithm.pg_variant == "starpo_s":
        unselected = groups - num_kept(groups, settings.algorithm.keep_fraction)
    return max(0.0, mean.get("filter/count", 0.0) - unselected)


def _filter_reason(algorithm: AlgorithmSection) -> str:
    has_other_filter = algorithm.pass_rate or algorithm.group_filter
    if algorithm.filter_zero_variance and not has_other_filter:
        return "had equal rewards"
    return "were filtered"


def _host_use(mean: Mapping[str, float]) -> HostUse | None:
    if not {"host/cores", "host/cpu_busy", "fleet/hosts"} <= mean.keys():
        return None
    return HostUse(mean["host/cores"], mean["host/cpu_busy"], mean["fleet/hosts"] <= 1)


_IDLE: Final = {"learner": "trainer/idle_ratio", "generation": "rollouter/idle_ratio"}


def _usable_rows(
    rows: Sequence[Mapping[str, Any]], settings: RunSettings
) -> list[Mapping[str, Any]]:
    """Return the newest rows of the present fleet, without the run's first and last steps.

    Until a step has taken groups of as many versions as it may, and once no more tickets are
    issued, steps are unlike the others.
    """
    staleness = settings.train.max_staleness
    first = staleness + 2
    last = settings.train.steps - staleness - 1
    # A damaged line may hold no step.
    rows = [row for row in rows if _is_number(row.get("step"))]
    if not rows:
        raise NotFitted(f"needs {first + MIN_STEPS} steps", first + MIN_STEPS)
    newest = rows[-1]
    required_names = [*NEEDED, *LENGTHS]
    if any(domain.rewards for domain in settings.trained_domains.values()):
        required_names += REWARDS
    if missing := [name for name in required_names if not _is_number(newest.get(name))]:
        if newest.get("fleet/servers") == 0 or newest.get("fleet/hubs") == 0:
            raise NotFitted("no server or no environment hub was there at the last step")
        raise NotFitted(f"the newest step has no {missing[0]}")
    usable_rows: list[Mapping[str, Any]] = []
    for row in reversed(rows):
        is_same_fleet = all(row.get(name) == newest.get(name) for name in FLEET)
        if (
            not is_same_fleet
            or not all(_is_number(row.get(name)) for name in (*NEEDED, *LENGTHS))
            or row["time/step"] <= 0
        ):
            break
        if first < row["step"] <= last:
            usable_rows.insert(0, row)
        if len(usable_rows) == MAX_STEPS:
            break
    if len(usable_rows) < MIN_STEPS:
        more = max(MIN_STEPS - len(usable_rows), first + MIN_STEPS - int(newest["step"]))
        if newest["step"] + more > last:
            raise NotFitted(
                f"the run has too few steps: it needs {MIN_STEPS} of the present fleet "
                f"besides its first {first} and its last {staleness + 1}"
            )
        raise NotFitted(f"needs {more} more steps of the present fleet", more)
    return usable_rows


def _request_delay(model: RunModel, generate_s: float, step_s: float) -> float:
    """Return the seconds of an episode's requests that the servers do not explain.

    Where servers are the limit, a longer way to them means fewer requests on them, so the way costs
    nothing; the delay is at most what the time of a step allows.
    """
    most = max(0.0, generate_s - simulate(model).generate_s)
    if simulate(replace(model, delay_s=most)).step_s <= step_s:
        return most
    least = 0.0
    # Five halvings: to 3 % of the interval, finer than the figures are.
    for _ in range(5):
        middle = (least + most) / 2
        if simulate(replace(model, delay_s=middle)).step_s <= step_s:
            least = middle
        else:
            most = middle
    return least


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _build_model(
    steps: Sequence[Mapping[str, Any]],
    mean: Mapping[str, float],
    settings: RunSettings,
    filtered: float,
) -> RunModel:
    train = settings.train
    groups = train.groups_per_step
    domains = list(settings.trained_domains.values())
    weights = sum(domain.weight for domain in domains)
    redundancy = sum(domain.weight * domain.group_size_redundancy for domain in domains)
    spare = round(redundancy / weights)
    greedy = num_greedy(settings.algorithm.adv_estimator)
    sizes = sum(domain.weight * domain.group_size for domain in domains)
    size = round(sizes / weights) + greedy + spare
    tokens = lengths_of(steps, groups * (size - spare)).scaled(mean["episode_tokens/mean"])
    episodes_per_s = groups * size / mean["time/step"]
    servers = max(1.0, mean["fleet/servers"])
    hubs = max(1.0, mean["fleet/hubs"])
    reward_hubs = max(1.0, mean.get("fleet/reward_hubs", 0.0))
    rewards = max((len(domain.rewards) for domain in domains), default=0)
    slowed = _split_time(mean, "env_call", episodes_per_s * mean["time/env_step"] / hubs)
    return RunModel(
        groups_per_step=groups,
        group_size=size,
        redundancy=spare,
        max_staleness=train.max_staleness,
        tokens=tokens,
        alike=_length_correlation(tokens, size - spare, mean["episode_tokens/group_max"]),
        drops_late=train.on_late == "drop",
        turns=mean["env/num_turns"],
        kept=groups / (groups + filtered),
        servers=servers,
        slots=max(1, round(mean["fleet/server_slots"] / servers)),
        token_s=mean["fleet/token_s"],
        token_each_s=mean["fleet/token_each_s"],
        hubs=hubs,
        envs=max(1, round(mean["fleet/envs"] / hubs)),
        env_s=mean["time/env_step"] * slowed[0],
        env_each_s=mean["time/env_step"] * slowed[1],
        env_spread=_log_spread(size - spare, mean["time/env_step"], mean["time/env_step_max"]),
        reward_hubs=reward_hubs,
        workers=max(1, round(mean.get("fleet/scores", 1.0) / reward_hubs)),
        score_s=rewards * mean["fleet/score_s"] if rewards else 0.0,
        score_each_s=rewards * mean["fleet/score_each_s"] if rewards else 0.0,
        scores_early=any(domain.score_ahead for domain in domains),
        group_s=max(0.0, mean["time/train"] - mean["time/finish_train"]) / groups,
        step_s=mean["time/finish_train"] + mean["time/publish_step"],
        rest_s=mean["time/between_steps"],
    )


def lengths_of(steps: Sequence[Mapping[str, Any]], num_samples: int) -> Lengths:
    """Return the distribution behind the quantiles of several steps.

    A quantile of ``num`` samples is one of them, or between two; the score of the i-th of them is
    at its median rank.
    """
    points: dict[float, float] = {}
    for name, share in LENGTHS.items():
        rank = (share * (num_samples - 1) + 0.7) / (num_samples + 0.4)
        points[NORMAL.inv_cdf(rank)] = math.exp(
            fmean(math.log(max(0.5, row[name])) for row in steps)
        )
    return Lengths(tuple(points.items()), max(row["episode_tokens/max"] for row in steps))


def _split_time(mean: Mapping[str, float], work: str, at_once: float) -> tuple[float, float]:
    """Return the shares of a measured time: of a call alone, and of each concurrent call."""
    base = mean.get(f"fleet/{work}_s", 0.0)
    per_call = mean.get(f"fleet/{work}_each_s", 0.0)
    total = base + per_call * max(1.0, at_once)
    return (base / total, per_call / total) if total > 0 else (1.0, 0.0)


def _draw_table(size: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    # A fixed seed, so that the same rows always give the same model.
    rng = np.random.default_rng(1)
    return rng.standard_normal((256, 1)), rng.standard_normal((256, size))


def _length_correlation(tokens: Lengths, size: int, longest: float) -> float:
    """Return the correlation of a group's lengths at which the longest has this mean.

    The lower the correlation, the longer is the longest.
    """
    group, own = _draw_table(size)
    grid = np.linspace(0.0, 0.95, 20)
    longest_means = [
        tokens.at(math.sqrt(alike) * group + math.sqrt(1 - alike) * own).max(axis=1).mean()
        for alike in grid
    ]
    return float(np.interp(-longest, -np.array(longest_means), grid))


def _log_spread(size: int, mean: float, longest: float) -> float:
    """Return the deviation of the logarithm at which the longest of a group has this mean."""
    if mean <= 0 or size < 2:
        return 0.0
    _, own = _draw_table(size)
    grid = np.linspace(0.0, 2.0, 41)
    longest_means = [
        float(np.exp(spread * own - spread * spread / 2).max(axis=1).mean()) for spread in grid
    ]
    return float(np.interp(longest / mean, np.maximum.accumulate(longest_means), grid))
