"""Requests into replies: what the engine cannot end, the desk in front of it does."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import numpy as np
import pytest
from waits import LONG_S, until

from broker.contract import wire
from rollout.engines.base import Engine, EngineStats, GenerationOutput
from rollout.request_handler import RequestHandler


class Slow:
    """Scores and samples when told; counts whom it works for."""

    policy_version = 3

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.working: set[str] = set()
        self.aborted: list[str] = []
        self.tokens: list[int] = []

    async def generate(self, request: wire.GenerateRequest) -> GenerationOutput:
        self.working.add(request.request_id)
        try:
            await self.go.wait()
        finally:
            self.working.discard(request.request_id)
        if self.tokens:
            return GenerationOutput(
                self.tokens, [-1.0] * len(self.tokens), [(3, len(self.tokens))], "stop"
            )
        rows = np.zeros((1, request.prompt_top_k), np.int32)
        return GenerationOutput(
            finish_reason="stop", top_ids=rows, top_logprobs=rows.astype(np.float32)
        )

    def stats(self) -> EngineStats:
        return EngineStats(running=len(self.working), slots=4)

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        self.go.set()


def scoring(name: str, deadline_s: float = LONG_S, k: int = 2) -> wire.GenerateRequest:
    return wire.GenerateRequest(
        request_id=name, conversation_id=name, token_ids=wire.column([1, 2], "<i4"),
        sampling=wire.SamplingParams(max_tokens=1),
        deadline_s=deadline_s, prompt_top_k=k,
    )  # fmt: skip


def desk(engine: Any) -> RequestHandler:
    return RequestHandler(cast(Engine, engine), "s", lambda _: None)


async def test_scoring_is_answered_at_its_deadline_and_goes_no_further() -> None:
    engine = Slow()
    reply = await asyncio.wait_for(desk(engine).handle(scoring("a", deadline_s=0.02)), LONG_S)
    assert (reply.finish_reason, reply.top_ids, reply.error) == ("deadline", None, "")
    await until(lambda: not engine.working)


async def test_scoring_can_be_aborted_and_other_requests_are_the_engines() -> None:
    engine = Slow()
    answering = desk(engine)
    one, other = (
        asyncio.create_task(answering.handle(scoring("a"))),
        asyncio.create_task(answering.handle(scoring("b", k=0))),
    )
    await until(lambda: engine.working == {"a", "b"})
    assert (
        await answering.handle(scoring("a"))
    ).error == "request_id 'a' is already running or waiting"
    answering.abort("a")
    assert (await asyncio.wait_for(one, LONG_S)).finish_reason == "abort"
    assert (engine.working, engine.aborted) == ({"b"}, [])
    answering.abort("b")
    await asyncio.wait_for(other, LONG_S)
    assert engine.aborted == ["b"]


async def test_an_asker_who_leaves_ends_its_scoring() -> None:
    engine = Slow()
    answering = desk(engine)
    task = asyncio.create_task(answering.handle(scoring("a")))
    await until(lambda: engine.working)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: not engine.working)
    assert len(answering) == 0
    engine.go.set()
    assert (await answering.handle(scoring("a"))).top_ids is not None


async def test_a_drain_ends_scoring_that_does_not_finish() -> None:
    engine = Slow()
    answering = desk(engine)
    task = asyncio.create_task(answering.handle(scoring("a")))
    await until(lambda: engine.working)
    assert await answering.finish(0.01) == 1
    assert (await task).finish_reason == "abort"


async def test_the_pace_of_tokens_is_measured() -> None:
    """Eight requests of three tokens, one after the other; those that score a context do not count."""
    engine = Slow()
    answering = desk(engine)
    for number in range(8):
        engine.go.clear()
        task = asyncio.create_task(answering.handle(scoring(f"r{number}", k=0)))
        await until(lambda: engine.working)
        await asyncio.sleep(0.02)
        engine.tokens = [1, 2, 3]
        engine.go.set()
        await task
    base_s, each_s = answering.curve.fit()
    assert 0.02 / 3 <= base_s + each_s < 1.0
