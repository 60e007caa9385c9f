"""Rewards that are Python functions of the process that started the run, as ``rlearner.train``.

``rewardhub.rewards.caller:NAME`` names one in a configuration. Only that process has the function;
its own reward hub serves the pool ``caller``, which other hubs leave alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Final

from rewardhub.rewards.base import NoScore, Sample

PREFIX: Final = f"{__name__}:"
POOL: Final = "caller"
# Names of the functions, for the processes that their owner starts.
VARIABLE: Final = "RL_CALLER_FUNCTIONS"


def is_callers(reward_name: str) -> bool:
    """Return whether a reward is a function of the process that started the run."""
    return reward_name.startswith(PREFIX)


def is_missing(reward_name: str) -> bool:
    """Return whether a reward is such a function, and its owner did not start this process."""
    names = os.environ.get(VARIABLE, "").split(",")
    return is_callers(reward_name) and reward_name.removeprefix(PREFIX) not in names


def describe_owner(reward_name: str) -> str:
    """Return where the function of such a reward is, for messages."""
    name = reward_name.removeprefix(PREFIX)
    return (
        f"{name} is a function of the Python program that started the run; continue the run from "
        f"there, or name a file: rewards.py:{name}"
    )


def __getattr__(name: str) -> Callable[..., Any]:
    """Return what stands for a function elsewhere, so that a configuration can be checked."""
    if name.startswith("_"):
        raise AttributeError(name)

    def refuse(sample: Sample, **args: object) -> float:
        raise NoScore(describe_owner(name))

    return refuse
