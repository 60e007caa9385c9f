"""A real server process whose request of a later step makes way, and the hub's part that continues
it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from test_rollout_service import Fleet, fleet, load, logprobs, model_path

from broker.contract import wire
from envhub.servers.generate import TurnGenerator
from envhub.servers.turn import TurnRequest

__all__ = ["fleet", "model_path"]
LONG = 1900
PROMPT = [10, 11, 12]


class Directory:
    """All live servers of a fleet."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def alive(self, policy: str) -> list[wire.Presence]:
        return [one for one in self._fleet.roster.alive("rollout") if one.policy == policy]

    def weights(self, policy: str) -> Mapping[str, float]:
        return {one.id: 1.0 for one in self.alive(policy)}

    async def changed(self, timeout_s: float) -> None:
        await self._fleet.roster.changed(timeout_s)


@pytest.fixture
def replies(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> list[wire.GenerateReply]:
    """What the servers answered."""
    seen: list[wire.GenerateReply] = []
    real = fleet.client.generate

    async def generate(*args: Any, **kwargs: Any) -> wire.GenerateReply:
        seen.append(reply := await real(*args, **kwargs))
        return reply

    monkeypatch.setattr(fleet.client, "generate", generate)
    return seen


async def test_a_later_steps_answer_makes_way_twice_at_most_and_loses_no_token(
    fleet: Fleet, model_path: str, replies: list[wire.GenerateReply]
) -> None:
    options = ("max_running=1", "max_context_tokens=2048", "preempt_after_s=0.0")
    await fleet.start("h1", "--policy", "frozen", *options)
    await fleet.serving("h1")
    hub = TurnGenerator(fleet.client, Directory(fleet), name="hub", max_retries=1)

    def turn(name: str, step: int, max_tokens: int) -> asyncio.Task[Any]:
        sampling = wire.SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=4)
        return asyncio.create_task(
            hub.turn(
                TurnRequest(
                    name, PROMPT, sampling, policy="frozen", step=step, expected_tokens=max_tokens
                )
            )
        )

    later = turn("later", 5, LONG)

    def aborts() -> int:
        return sum(reply.finish_reason == "abort" for reply in replies)

    number = 0
    while aborts() < 2:  # one that comes before the later one has begun again interrupts nothing
        assert len((await turn(f"needed{number}", 4, 8)).token_ids) == 8
        assert not later.done()
        number += 1
    assert len((await turn("last", 4, 8)).token_ids) == 8
    assert later.done()  # the last one had to wait for it
    sampled = await later
    assert (len(sampled.token_ids), sampled.finish_reason) == (LONG, "length")
    assert [reply.finish_reason for reply in replies if len(reply.token_ids.array()) != 8] == [
        "abort",
        "abort",
        "length",
    ]
    expected = logprobs(load(model_path), PROMPT, sampled.token_ids.tolist())
    assert np.abs(expected - np.array(sampled.logprobs)).max() < 1e-3
