"""The changes of a run that can be predicted: keys, bounds and effect on the model. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from broker.errors import UserError
from rlearner.advise.run_model import RunModel

# Bound of figures that do not lengthen a simulation.
MOST: Final = 100_000
# A simulation compares all hubs at each start of a group.
MOST_HUBS: Final = 1024


@dataclass(frozen=True)
class Key:
    """One thing that can change.

    Attributes:
        text: what the number counts, for people.
        now: its present value.
        least, most: the smallest and the largest value allowed; larger ones would take minutes to
            simulate.
        is_whole: whether it must be a whole number.
    """

    text: str
    now: Callable[[RunModel], float]
    apply: Callable[[RunModel, float], RunModel]
    least: float = 1
    most: float = MOST
    is_whole: bool = True


def _with_samples(model: RunModel, changed: RunModel) -> RunModel:
    """Return the changed model, in which the learner's work follows the samples of a step."""
    episodes = (changed.group_size - changed.redundancy) / (model.group_size - model.redundancy)
    samples = changed.samples_per_step / model.samples_per_step
    step_s = model.step_s
    # A learner with hardly any work per group trains a step at once, when it is complete.
    if model.group_s < 0.05 * model.step_s / model.groups_per_step:
        step_s *= samples
    return replace(changed, group_s=model.group_s * episodes, step_s=step_s)


def _speed_up_learner(model: RunModel, factor: float) -> RunModel:
    return replace(model, group_s=model.group_s / factor, step_s=model.step_s / factor)


def _set_groups(model: RunModel, groups: float) -> RunModel:
    return _with_samples(model, replace(model, groups_per_step=int(groups)))


def _set_group_size(model: RunModel, size: float) -> RunModel:
    return _with_samples(model, replace(model, group_size=int(size) + model.redundancy))


def _set_redundancy(model: RunModel, spare: float) -> RunModel:
    return replace(
        model, group_size=model.group_size - model.redundancy + int(spare), redundancy=int(spare)
    )


KEYS: Final[dict[str, Key]] = {
    "servers": Key(
        "rollout servers", lambda run: run.servers, lambda run, value: replace(run, servers=value)
    ),
    "slots": Key(
        "requests at once on a server",
        lambda run: run.slots,
        lambda run, value: replace(run, slots=int(value)),
    ),
    "hubs": Key(
        "environment hubs",
        lambda run: run.hubs,
        lambda run, value: replace(run, hubs=value),
        most=MOST_HUBS,
    ),
    "envs": Key(
        "environments on a hub",
        lambda run: run.envs,
        lambda run, value: replace(run, envs=int(value)),
    ),
    "reward_hubs": Key(
        "reward hubs",
        lambda run: run.reward_hubs,
        lambda run, value: replace(run, reward_hubs=value),
        most=MOST_HUBS,
    ),
    "workers": Key(
        "scores at once on a reward hub",
        lambda run: run.workers,
        lambda run, value: replace(run, workers=int(value)),
    ),
    "max_staleness": Key(
        "train.max_staleness",
        lambda run: run.max_staleness,
        lambda run, value: replace(run, max_staleness=int(value)),
        least=0,
        most=64,
    ),
    "groups_per_step": Key("train.groups_per_step", lambda run: run.groups_per_step, _set_groups),
    "group_size": Key(
        "group_size", lambda run: run.group_size - run.redundancy, _set_group_size, most=1024
    ),
    "group_size_redundancy": Key(
        "group_size_redundancy", lambda run: run.redundancy, _set_redundancy, least=0, most=1024
    ),
    "learner": Key(
        "speed of the learner, now 1",
        lambda run: 1.0,
        _speed_up_learner,
        least=0.01,
        is_whole=False,
    ),
}


def parse_changes(text: str) -> dict[str, float]:
    """Return the changes of ``servers=8,hubs=2``.

    Raises:
        UserError: names the key or the value, and what is allowed.
    """
    changes: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if not name:
            raise UserError(
                f"--simulate {text!r}: expected KEY=VALUE,…; KEY is one of {', '.join(KEYS)}"
            )
        if name not in KEYS:
            raise UserError(
                f"--simulate {part.strip()}: unknown key {name!r}; allowed: {', '.join(KEYS)}"
            )
        if name in changes:
            raise UserError(f"--simulate {part.strip()}: {name} is given twice")
        changes[name] = _parse_number(name, value)
    return changes


def _parse_number(name: str, value: str) -> float:
    key = KEYS[name]
    parse_number: Callable[[str], float] = float
    allowed = f"a number from {key.least:g} to {key.most:g}"
    if key.is_whole:
        parse_number = int
        allowed = f"a whole number from {key.least:g} to {key.most:g}"
    try:
        number = parse_number(value)
    except ValueError:
        raise UserError(f"--simulate {name}={value}: expected {allowed}") from None
    if not key.least <= number <= key.most:
        raise UserError(f"--simulate {name}={value}: expected {allowed}")
    return float(number)


def apply_changes(model: RunModel, changes: Mapping[str, float]) -> RunModel:
    """Return the model with all changes."""
    for name, value in changes.items():
        model = KEYS[name].apply(model, value)
    return model


def usual_changes(model: RunModel) -> Sequence[tuple[dict[str, float], str]]:
    """Return the changes that the table lists, each with its text."""
    servers = round(model.servers)
    hubs = round(model.hubs)
    staleness = model.max_staleness
    more = max(1, round(servers / 4))
    spare = max(1, (model.group_size - model.redundancy) // 4) + model.redundancy
    listed_changes: list[tuple[dict[str, float], str]] = [
        ({"servers": servers + more}, f"{_count_noun(more, 'more server')} of this speed"),
        ({"servers": servers + 2 * more}, f"{_count_noun(2 * more, 'more server')} of this speed"),
        ({"servers": 2 * servers}, f"{_count_noun(servers, 'more server')} of this speed"),
        ({"max_staleness": staleness + 1}, f"max_staleness {staleness + 1}"),
        ({"max_staleness": staleness + 2}, f"max_staleness {staleness + 2}"),
        ({"hubs": 2 * hubs}, f"{_count_noun(hubs, 'more environment hub')}"),
        ({"learner": 1.5}, "a learner 1.5 times as fast"),
        ({"learner": 2.0}, "a learner twice as fast"),
        ({"group_size_redundancy": spare}, f"group_size_redundancy {spare}"),
    ]
    if model.score_s:
        reward_hubs = round(model.reward_hubs)
        listed_changes.append(
            ({"reward_hubs": 2 * reward_hubs}, f"{_count_noun(reward_hubs, 'more reward hub')}")
        )
    # A small fleet may give the same change twice.
    return list(
        {tuple(changes.items()): (changes, text) for changes, text in listed_changes}.values()
    )


def _count_noun(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
