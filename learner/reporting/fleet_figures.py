"""Computes the number and speed of a step's processes from their announcements. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from broker.contract import wire
from broker.contract.wire import ACTOR

# By role: the processes, their slots, the seconds of a unit of work, and the additional seconds for
# each other unit that runs at the same time.
NAMES: Final = {
    "rollout": ("servers", "server_slots", "token_s", "token_each_s"),
    "envhub": ("hubs", "envs", "env_call_s", "env_call_each_s"),
    "rewardhub": ("reward_hubs", "scores", "score_s", "score_each_s"),
}


def fleet_figures(role: str, present: Sequence[wire.Presence]) -> dict[str, float]:
    """Return ``fleet/*`` of one role: counts of all that take work, means of their times.

    Servers of other policies than the actor do not count.
    """
    count_key, slots_key, base_key, each_key = (f"fleet/{name}" for name in NAMES[role])
    workers = [
        process
        for process in present
        if process.state == "serving" and (role != "rollout" or process.policy == ACTOR)
    ]
    measured = [worker for worker in workers if worker.base_s or worker.each_s]
    slots = [worker.at_once if role == "rewardhub" else worker.slots for worker in workers]
    values = {count_key: float(len(workers)), slots_key: float(sum(slots))}
    if measured:
        values[base_key] = sum(worker.base_s for worker in measured) / len(measured)
        values[each_key] = sum(worker.each_s for worker in measured) / len(measured)
    return values
