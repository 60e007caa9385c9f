"""Generated groups that replace hubs and servers, to measure only the learner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from broker.contract import wire


def trajectory(
    episode: int,
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    *,
    version: int,
    reward: float,
    **more: Any,
) -> wire.Trajectory:
    """Return one turn of one version that ends with one answer token per logprob; ``more``: other
    fields.
    """
    end = len(token_ids)
    sampled = len(logprobs)
    start = end - sampled
    given: dict[str, Any] = {
        "turns": [
            wire.Turn(
                start=start,
                end=end,
                reward=reward,
                valid=True,
                finish_reason="stop",
                server="made-up",
            )
        ],
        "success": reward > 0,
    }
    return wire.Trajectory(
        episode=episode,
        token_ids=wire.column(token_ids, "<i4"),
        loss_mask=wire.column([0] * start + [1] * sampled, "|u1"),
        logprobs=wire.column([0.0] * start + list(logprobs), "<f4"),
        version_runs=wire.column([version, sampled], "<i4"),
        reward=reward,
        reward_parts={"env": reward},
        end="terminated",
        **{**given, **more},
    )


def group(
    ticket: wire.Ticket | wire.EvalTicket, trajectories: list[wire.Trajectory], **more: Any
) -> wire.Group:
    """Return the group of a ticket as a hub makes it; ``more``: other fields."""
    return wire.Group(
        ticket=ticket.number,
        domain=ticket.domain,
        task_index=ticket.task_index,
        min_version=ticket.min_version,
        hub="made-up",
        deliveries=1,
        pools=[],
        trajectories=trajectories,
        **more,
    )
