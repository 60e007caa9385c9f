"""The timeouts of a run; each null is derived from the next inner one.

A turn < an episode < a group < a ticket:

| key | null means |
|---|---|
| envhub.generate_timeout_s | sampling.max_tokens / envhub.min_tokens_per_s, at least 120 s |
| envhub.episode_timeout_s | max_turns * seats * (a turn + step_timeout_s) + 2 * step_timeout_s |
| domains.*.deadline_s | (waves + 1) * an episode; waves: a group's episodes / envhub.n, up |
| train.ticket_timeout_s | 2 * (deadline_s + longest time of reward hubs for a group) |
| eval.timeout_s | train.ticket_timeout_s, at least 600 s |

The sections envhub, train and eval hold one value for all domains: the longest. A value that is set
limits the values derived inside it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from broker.errors import ConfigError
from broker.settings.config import num_greedy
from broker.settings.run_settings import RunSettings

# for a short turn: time to load new weights, and for a retry on another server
TURN_S: Final = 120.0
EVALUATION_S: Final = 600.0
# a hub ends its groups itself; only one that fails to should have its tickets closed
TRIES: Final = 2
CALLS: Final = 2  # of an environment in addition to its steps: creation and reset

GENERATE = "envhub.generate_timeout_s"
EPISODE = "envhub.episode_timeout_s"
TICKET = "train.ticket_timeout_s"
# Besides the domains' deadline_s, in the order in which they become null again.
DERIVED: Final = (
    ("envhub", "episode_timeout_s"),
    ("envhub", "generate_timeout_s"),
    ("train", "ticket_timeout_s"),
    ("eval", "timeout_s"),
)


def derive(settings: RunSettings, scoring_s: Mapping[str, float]) -> RunSettings:
    """Return settings with every timeout that is null filled in.

    Args:
        scoring_s: by domain, the longest time that reward hubs take for one group, in seconds.

    Raises:
        ConfigError: if two timeouts that are set contradict each other; names both.
    """
    _refuse_contradictions(settings)
    envhub = settings.envhub
    turn = envhub.generate_timeout_s
    episode = envhub.episode_timeout_s
    ticket = settings.train.ticket_timeout_s
    greedy = num_greedy(settings.algorithm.adv_estimator)
    step_s = envhub.step_timeout_s
    turns = [TURN_S]
    episodes = [0.0]
    deadlines: dict[str, float] = {}
    for name, domain in settings.domains.items():
        turn_s = turn or max(TURN_S, domain.sampling.max_tokens / envhub.min_tokens_per_s)
        num_turns = domain.max_turns * max(len(domain.seats), 1)
        episode_s = episode or num_turns * (turn_s + step_s) + CALLS * step_s
        deadline_s = domain.deadline_s
        if deadline_s is None:
            size = domain.group_size + greedy + domain.group_size_redundancy
            if not domain.weight:
                size = settings.eval.of_domain(domain).group_size
            waves = math.ceil(size / envhub.n)
            most_s = math.inf if ticket is None else max(ticket / TRIES, episode or turn or 0.0)
            deadline_s = min((waves + 1) * episode_s, most_s)
        deadlines[name] = deadline_s
        turns.append(turn_s)
        episodes.append(min(episode_s, deadline_s))
    if episode is None:
        episode = max(episodes) or TURN_S
    if turn is None:
        turn = min(max(turns), episode)
    if ticket is None:
        groups = [deadline + scoring_s.get(name, 0.0) for name, deadline in deadlines.items()]
        ticket = TRIES * max(groups, default=episode)
    evaluation = settings.eval.timeout_s
    if evaluation is None:
        evaluation = max(EVALUATION_S, ticket)
    domains = {
        name: domain.model_copy(update={"deadline_s": deadlines[name]})
        for name, domain in settings.domains.items()
    }
    settings = settings.model_copy(update={"domains": domains})
    settings = settings.with_values("envhub", generate_timeout_s=turn, episode_timeout_s=episode)
    settings = settings.with_values("train", ticket_timeout_s=ticket)
    return settings.with_values("eval", timeout_s=evaluation)


def release(settings: RunSettings, scoring_s: Mapping[str, float]) -> RunSettings:
    """Return settings in which timeouts that ``derive`` would fill in are null again.

    They then follow later changes, as they did when the run was first configured.
    """
    released = settings
    for name, domain in settings.domains.items():
        open_domain = domain.model_copy(update={"deadline_s": None})
        candidate = released.model_copy(update={"domains": {**released.domains, name: open_domain}})
        if derive(candidate, scoring_s) == settings:
            released = candidate
    for section, field in DERIVED:
        candidate = released.with_values(section, **{field: None})
        if derive(candidate, scoring_s) == settings:
            released = candidate
    return released


def seconds(value: float | None) -> float:
    """Return a timeout of a checked configuration, which is not null."""
    if value is None:
        raise ValueError(
            "a timeout is null: broker.settings.runspec.validate derives it, or give it"
        )
    return value


def note(settings: RunSettings) -> str:
    """Return the timeouts of checked settings in one line, for the operator."""
    envhub = settings.envhub
    deadlines = {seconds(domain.deadline_s) for domain in settings.domains.values()}
    groups = " or ".join(f"{deadline:g}" for deadline in sorted(deadlines))
    return (
        f"timeouts: a turn {envhub.generate_timeout_s:g} s, an episode "
        f"{envhub.episode_timeout_s:g} s, a group "
        f"{groups} s, a ticket {settings.train.ticket_timeout_s:g} s in one hub: steps, "
        "pauses, queues and missing "
        "hubs may take any time"
    )


def _refuse_contradictions(settings: RunSettings) -> None:
    """Compare the timeouts that are set; derived ones cannot contradict them."""
    turn = settings.envhub.generate_timeout_s
    episode = settings.envhub.episode_timeout_s
    ticket = settings.train.ticket_timeout_s
    if turn is not None and episode is not None and turn > episode:
        raise ConfigError(GENERATE, turn, f"at most {EPISODE}, which is {episode:g}")
    inner = [
        (key, value) for key, value in ((GENERATE, turn), (EPISODE, episode)) if value is not None
    ]
    deadlines = {
        f"domains.{name}.deadline_s": domain.deadline_s for name, domain in settings.domains.items()
    }
    set_deadlines = [(key, deadline) for key, deadline in deadlines.items() if deadline is not None]
    if inner and deadlines and len(set_deadlines) == len(deadlines):
        longest, most = max(set_deadlines, key=lambda item: item[1])
        for key, value in inner:
            if value > most:
                hint = ", the longest" * (len(deadlines) > 1)
                raise ConfigError(key, value, f"at most {longest}{hint}, which is {most:g}")
    if ticket is not None:
        for key, value in (*inner, *set_deadlines):
            if ticket <= value:
                raise ConfigError(TICKET, ticket, f"above {key}, which is {value:g}")
