"""Passes requests from every transport to one engine, turns outputs into replies, and drains."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final

import numpy as np

from broker.contract import wire
from broker.runtime.load_curve import LoadCurve
from broker.runtime.spans import SpanRecorder
from rlearner_text.openai.http_errors import ENGINE_FAILED
from rlearner_text.openai.token_events import TokenEvent, TokenListener, TopLogprobs
from rollout.engines.base import Engine, GenerationOutput, StreamingEngine

ABORT_REPLY_S: Final = 2.0  # time for aborted requests to return their partial output


class RequestHandler:
    """Request handler in front of one engine.

    Args:
        server: id in the replies.
        answered: called with the seconds that each request took, queueing included.
        spans: of the server, for the timeline.

    Attributes:
        draining: new requests get an empty reply, so that the client tries another server.
        curve: how fast tokens are sampled at which load.
    """

    def __init__(
        self,
        engine: Engine,
        server: str,
        answered: Callable[[float], None],
        spans: SpanRecorder | None = None,
    ) -> None:
        self._engine = engine
        self._server = server
        self._answered = answered
        self._spans = spans or SpanRecorder()
        self._tapped = engine if isinstance(engine, StreamingEngine) else None
        self.curve = LoadCurve(lambda: engine.stats().slots)
        self._outstanding: set[str] = set()
        self._scoring: dict[str, asyncio.Future[GenerationOutput]] = {}
        self._awake = asyncio.Event()
        self._num_scoring = 0
        self._scored = asyncio.Event()
        self._awake.set()
        self._scored.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = False

    def __len__(self) -> int:
        return len(self._outstanding)

    async def handle(
        self, request: wire.GenerateRequest, tap: TokenListener | None = None, /
    ) -> wire.GenerateReply:
        """Answer one request.

        Args:
            tap: receives tokens as they are sampled, if the engine supports it.
        """
        if self.draining:
            return self._reply(request, GenerationOutput(finish_reason="abort"))
        began = time.monotonic()
        entered = self._spans.enter("generate")
        self._outstanding.add(request.request_id)
        self._idle.clear()
        try:
            return self._reply(request, await self._ask(request, tap))
        except RuntimeError as error:
            return self._reply(request, GenerationOutput(error=f"{ENGINE_FAILED}: {error}"))
        finally:
            self._spans.leave("generate", entered)
            self._answered(time.monotonic() - began)
            self._outstanding.discard(request.request_id)
            if not self._outstanding:
                self._idle.set()

    def abort(self, request_id: str) -> None:
        """End a request early; ignore an unknown one."""
        if (scoring := self._scoring.get(request_id)) is not None:
            scoring.cancel()
        else:
            self._engine.abort(request_id)

    async def finish(self, timeout_s: float) -> int:
        """Wait for outstanding requests, abort the rest, and return how many were aborted."""
        if await self._quiet(timeout_s):
            return 0
        request_ids = list(self._outstanding)
        for request_id in request_ids:
            self.abort(request_id)
        await self._quiet(ABORT_REPLY_S)
        return len(request_ids)

    async def hold_scores(self) -> None:
        """Let requests that score a context wait, and return once none is in the engine; others
        wait there.
        """
        self._awake.clear()
        await self._scored.wait()

    def release_scores(self) -> None:
        """Go on scoring."""
        self._awake.set()

    async def _ask(
        self, request: wire.GenerateRequest, tap: TokenListener | None
    ) -> GenerationOutput:
        if request.scores_context:
            return await self._score(request)
        began = self.curve.enter(time.monotonic())
        output = GenerationOutput()
        try:
            output = await self._sample(request, tap)
            return output
        finally:
            self.curve.leave(began, time.monotonic(), len(output.token_ids))

    async def _sample(
        self, request: wire.GenerateRequest, tap: TokenListener | None
    ) -> GenerationOutput:
        if self._tapped is None:
            return await self._engine.generate(request)
        if request.sampling.top_logprobs and self._tapped.tells_top:
            return await self._with_top(self._tapped, request, tap)
        return await (
            self._engine.generate(request) if tap is None else self._tapped.generate(request, tap)
        )

    async def _with_top(
        self, engine: StreamingEngine, request: wire.GenerateRequest, tap: TokenListener | None
    ) -> GenerationOutput:
        """Generate, and add the likeliest tokens at each position as the columns of a reply."""
        k = request.sampling.top_logprobs
        tops = list[TopLogprobs]()

        def told(piece: TokenEvent) -> None:
            tops.extend(piece.top)
            if tap is not None:
                tap.on_tokens(piece)

        output = await engine.generate(request, TokenListener(told, k))
        if output.error or len(tops) != len(output.token_ids):
            return output
        rows = [[*top, *[top[-1]] * (k - len(top))] for top in tops]
        ids = np.array([[token for token, _ in row] for row in rows], np.int32)
        values = np.array([[logprob for _, logprob in row] for row in rows], np.float32)
        return replace(output, top_ids=ids, top_logprobs=values)

    async def _score(self, request: wire.GenerateRequest) -> GenerationOutput:
        """Score a context; enforce abort and deadline here, as engines have no partial output of
        such a request.
        """
        if request.request_id in self._scoring:
            return GenerationOutput(
                error=f"request_id {request.request_id!r} is already running or waiting"
            )
        work = self._scoring[request.request_id] = asyncio.ensure_future(self._score_awake(request))
        try:
            await asyncio.wait([work], timeout=request.deadline_s)
            if work.cancelled():
                return GenerationOutput(finish_reason="abort")
            return work.result() if work.done() else GenerationOutput(finish_reason="deadline")
        finally:
            work.cancel()
            del self._scoring[request.request_id]

    async def _score_awake(self, request: wire.GenerateRequest) -> GenerationOutput:
        await self._awake.wait()
        self._num_scoring += 1
        self._scored.clear()
        try:
            return await self._engine.generate(request)
        finally:
            self._num_scoring -= 1
            if not self._num_scoring:
                self._scored.set()

    async def _quiet(self, timeout_s: float) -> bool:
        """Wait until no request is outstanding; return False on timeout."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def _reply(self, request: wire.GenerateRequest, output: GenerationOutput) -> wire.GenerateReply:
        runs = np.array(output.version_runs, dtype="<i4").reshape(-1)
        return wire.GenerateReply(
            request_id=request.request_id,
            server=self._server,
            token_ids=wire.column(output.token_ids, "<i4"),
            logprobs=wire.column(output.logprobs, "<f4"),
            version_runs=wire.column(runs, "<i4"),
            finish_reason=output.finish_reason,
            policy_version=self._engine.policy_version,
            prefix_hit_tokens=output.prefix_hit_tokens,
            error=output.error,
            top_ids=None
            if output.top_ids is None
            else wire.column(output.top_ids.reshape(-1), "<i4"),
            top_logprobs=None
            if output.top_logprobs is None
            else wire.column(output.top_logprobs.reshape(-1), "<f4"),
            reshaped=wire.column(output.reshaped, "|u1") if any(output.reshaped) else None,
            prompt_logprobs=None
            if output.prompt_logprobs is None
            else wire.column(output.prompt_logprobs, "<f4"),
        )
