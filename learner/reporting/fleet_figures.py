"""Figures of the processes that work for a step, from what they announce: how many there are, and
how fast. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from broker.contract import wire
from broker.contract.wire import ACTOR

# role: processes, what they run at once, seconds of one unit of their work, more for each at once
NAMES: Final = {
    "rollout": ("servers", "server_slots", "token_s", "token_each_s"),
    "envhub": ("hubs", "envs", "env_call_s", "env_call_each_s"),
    "rewardhub": ("reward_hubs", "scores", "score_s", "score_each_s"),
}


def fleet_figures(role: str, present: Sequence[wire.Presence]) -> dict[str, float]:
    """Return ``fleet/*`` of one role: counts of those that take work, and means over those that
    have measured.

    Servers of other policies than the actor do not count.
    """
    count, slots, base, each = (f"fleet/{name}" for name in NAMES[role])
    found = [
        one
        for one in present
        if one.state == "serving" and (role != "rollout" or one.policy == ACTOR)
    ]
    measured = [one for one in found if one.base_s or one.each_s]
    at_once = [one.at_once if role == "rewardhub" else one.slots for one in found]
    values = {count: float(len(found)), slots: float(sum(at_once))}
    if measured:
        values[base] = sum(one.base_s for one in measured) / len(measured)
        values[each] = sum(one.each_s for one in measured) / len(measured)
    return values
