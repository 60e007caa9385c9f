"""The timeouts of a run; each null is derived from the next inner one.

A turn < an episode < a group < a ticket:

==========================
========================================================================================= key
null means ==========================
=========================================================================================
envhub.generate_timeout_s   sampling.max_tokens / envhub.min_tokens_per_s, at least 120 s
envhub.episode_timeout_s    max_turns * (a turn + envhub.step_timeout_s) + 2 * envhub.step_timeout_s
domains.*.deadline_s        (waves + 1) * an episode; waves = episodes of a group / envhub.n,
rounded up train.ticket_timeout_s      2 * (deadline_s + longest time of reward hubs for a group)
eval.timeout_s              train.ticket_timeout_s, at least 600 s ==========================
=========================================================================================

The sections envhub, train and eval hold one value for all domains: the longest. A value that is set
limits the values derived inside it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any, Final

from broker.errors import ConfigError
from broker.settings.config import num_greedy

# for a short turn: time to load new weights, and for a retry on another server
TURN_S: Final = 120.0
EVALUATION_S: Final = 600.0
# a hub ends its groups itself; only one that fails to should have its tickets closed
TRIES: Final = 2
CALLS: Final = 2  # of an environment in addition to its steps: creation and reset

GENERATE = "envhub.generate_timeout_s"
EPISODE = "envhub.episode_timeout_s"
TICKET = "train.ticket_timeout_s"


def derive(config: dict[str, Any], scoring_s: Mapping[str, float]) -> None:
    """Fill in every timeout that is null, in place.

    Args:
        config: every section with its defaults.
        scoring_s: by domain, the longest time that reward hubs take for one group, in seconds.

    Raises:
        ConfigError: if two timeouts that are set contradict each other; names both.
    """
    envhub = config["envhub"]
    train = config["train"]
    domains = config["domains"]
    _refuse_contradictions(envhub, train, domains)
    turn = envhub["generate_timeout_s"]
    episode = envhub["episode_timeout_s"]
    ticket = train["ticket_timeout_s"]
    greedy = num_greedy(config["algorithm"]["adv_estimator"])
    step_s = envhub["step_timeout_s"]
    turns = [TURN_S]
    episodes = [0.0]
    for domain in domains.values():
        turn_s = turn or max(TURN_S, domain["sampling"]["max_tokens"] / envhub["min_tokens_per_s"])
        episode_s = episode or domain["max_turns"] * (turn_s + step_s) + CALLS * step_s
        if domain["deadline_s"] is None:
            waves = math.ceil(
                (domain["group_size"] + greedy + domain["group_size_redundancy"]) / envhub["n"]
            )
            most_s = math.inf if ticket is None else max(ticket / TRIES, episode or turn or 0.0)
            domain["deadline_s"] = min((waves + 1) * episode_s, most_s)
        turns.append(turn_s)
        episodes.append(min(episode_s, domain["deadline_s"]))
    if episode is None:
        envhub["episode_timeout_s"] = max(episodes) or TURN_S
    if turn is None:
        envhub["generate_timeout_s"] = min(max(turns), envhub["episode_timeout_s"])
    if ticket is None:
        groups = [
            domain["deadline_s"] + scoring_s.get(name, 0.0) for name, domain in domains.items()
        ]
        train["ticket_timeout_s"] = TRIES * max(groups, default=envhub["episode_timeout_s"])
    if config["eval"]["timeout_s"] is None:
        config["eval"]["timeout_s"] = max(EVALUATION_S, train["ticket_timeout_s"])


def release(config: dict[str, Any], scoring_s: Mapping[str, float]) -> dict[str, Any]:
    """Return a configuration in which timeouts that ``derive`` would fill in are null again.

    They then follow later changes, as they did when the run was first configured.
    """
    released = copy.deepcopy(config)
    places = [(domain, "deadline_s") for domain in released["domains"].values()]
    places += [
        (released["envhub"], "episode_timeout_s"),
        (released["envhub"], "generate_timeout_s"),
    ]
    places += [(released["train"], "ticket_timeout_s"), (released["eval"], "timeout_s")]
    for section, key in places:
        value = section[key]
        section[key] = None
        derived = copy.deepcopy(released)
        derive(derived, scoring_s)
        if derived != config:
            section[key] = value
    return released


def seconds(value: float | None) -> float:
    """Return a timeout of a checked configuration, which is not null."""
    if value is None:
        raise ValueError(
            "a timeout is null: broker.settings.runspec.validate derives it, or give it"
        )
    return value


def note(config: dict[str, Any]) -> str:
    """Return the timeouts of a checked configuration in one line, for the operator."""
    envhub = config["envhub"]
    deadlines = {domain["deadline_s"] for domain in config["domains"].values()}
    groups = " or ".join(f"{deadline:g}" for deadline in sorted(deadlines))
    return (
        f"timeouts: a turn {envhub['generate_timeout_s']:g} s, an episode "
        f"{envhub['episode_timeout_s']:g} s, a group "
        f"{groups} s, a ticket {config['train']['ticket_timeout_s']:g} s in one hub: steps, "
        "pauses, queues and missing "
        "hubs may take any time"
    )


def _refuse_contradictions(
    envhub: Mapping[str, Any], train: Mapping[str, Any], domains: Mapping[str, Any]
) -> None:
    """Compare the timeouts that are set; derived ones cannot contradict them."""
    turn = envhub["generate_timeout_s"]
    episode = envhub["episode_timeout_s"]
    ticket = train["ticket_timeout_s"]
    if turn is not None and episode is not None and turn > episode:
        raise ConfigError(GENERATE, turn, f"at most {EPISODE}, which is {episode:g}")
    inner = [
        (key, value) for key, value in ((GENERATE, turn), (EPISODE, episode)) if value is not None
    ]
    deadlines = {
        f"domains.{name}.deadline_s": domain["deadline_s"] for name, domain in domains.items()
    }
    if inner and deadlines and None not in deadlines.values():
        longest, most = max(deadlines.items(), key=lambda item: item[1])
        for key, value in inner:
            if value > most:
                hint = ", the longest" * (len(deadlines) > 1)
                raise ConfigError(key, value, f"at most {longest}{hint}, which is {most:g}")
    if ticket is not None:
        for key, value in (*inner, *deadlines.items()):
            if value is not None and ticket <= value:
                raise ConfigError(TICKET, ticket, f"above {key}, which is {value:g}")
