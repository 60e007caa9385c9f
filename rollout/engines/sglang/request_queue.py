"""Queues the requests of the engine ``sglang`` and runs them in the server, in one or more calls
each.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, Final

import numpy as np

from broker.contract import wire
from rlearner_text.guided_decoding import GuideCompiler
from rlearner_text.tokenizer import Tokenizer
from rollout.engines.base import NO_VERSION, EngineConfig, EngineStats, GenerationOutput
from rollout.engines.context_scores import ContextScores
from rollout.engines.hf.logit_offsets import is_reshaped
from rollout.engines.sglang.client import (
    SGLangClient,
    SGLangRequestError,
    generate_body,
    read_leg,
    read_scores,
    read_top,
    score_body,
)
from rollout.engines.sglang.running_request import RunningRequest
from rollout.engines.stop_strings import StopStrings
from rollout.job_queue import GenerationJob
from rollout.scheduler import Scheduler

log = logging.getLogger(__name__)

Spawn = Callable[[Coroutine[Any, Any, None]], None]

SCORE_TIMEOUT_S: Final = 120.0
ABORT_AGAIN_S: Final = 0.25  # a request still on its way into the server misses the first abort
RETURN_WITHIN_S: Final = 60.0  # for the server to return aborted requests


class SGLangRequestQueue:
    """Waiting requests, longest first, and those that run in the server.

    Args:
        spawn: runs a coroutine in the background.

    Attributes:
        open: set while requests may be sent to the server.
        updating: held while the server's weights change.
        loads: number of weight loads; each has its own namespace of the prefix cache, so no request
            reuses older KV.
        pause_s: seconds in which generation paused.
        tokenizer: finds stop strings that an update splits.
    """

    def __init__(self, config: EngineConfig, spawn: Spawn) -> None:
        section = config.section
        self._slots = section.max_running
        self._max_context = section.max_context_tokens
        self.scheduler = Scheduler(
            num_slots=section.max_running,
            max_running=section.max_running,
            prefix_cache=False,
            version=config.policy_version,
            preempt_after_s=section.preempt_after_s,
        )
        self.open = asyncio.Event()
        self.updating = asyncio.Lock()
        self.loads = 0
        self.pause_s = 0.0
        self.api: SGLangClient | None = None
        self.tokenizer: Tokenizer | None = None
        self._spawn = spawn
        self._requests: dict[str, RunningRequest] = {}
        self._closed = False
        self._timer: asyncio.TimerHandle | None = None
        self._finished: Counter[str] = Counter()
        self._generated = self._prefilled = self._hits = 0
        self._busy_s = self._busy_since = 0.0

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def close(self) -> None:
        """Start no more requests and fail those that wait or run."""
        self._closed = True
        self.fail("the engine was closed")
        if self._timer is not None:
            self._timer.cancel()

    def fail(self, reason: str) -> None:
        """Fail every unanswered request with this error."""
        for running in self._requests.values():
            if not running.answer.done():
                running.answer.set_exception(RuntimeError(reason))

    async def run(self, request: wire.GenerateRequest) -> GenerationOutput:
        """Run a valid request to its end."""
        job = GenerationJob.of(request, time.monotonic())
        texts = request.sampling.stop
        stops = StopStrings(self.tokenizer, texts) if texts and self.tokenizer is not None else None
        running = self._requests[request.request_id] = RunningRequest(
            request, job, self._max_context, stops
        )
        self.scheduler.submit(job)
        self._admit()
        try:
            return self.count(await running.answer)
        finally:
            if not running.answer.done() or running.answer.cancelled():  # cancelled by the caller
                self.abort(request.request_id)

    def abort(self, request_id: str) -> None:
        """End a request with its output so far; ignore an unknown one."""
        if (running := self._requests.get(request_id)) is not None:
            self._end(running, "abort")

    def abort_running(self) -> None:
        """End all running requests with their output so far."""
        for running in list(self._requests.values()):
            if running.job.slot >= 0:
                self._end(running, "abort")

    def sent(self) -> Iterator[RunningRequest]:
        """Return the requests that are in the server now."""
        return (running for running in self._requests.values() if running.rid)

    def serve(self, version: int, *, changed: bool) -> None:
        """Serve requests with the weights of this version; abort those that require a newer one."""
        for job in self.scheduler.update(version, weights_changed=changed):
            self._end(self._requests[job.request_id], "abort")
        self.open.set()
        self._admit()

    def resume(self) -> None:
        """Send requests again after ``open`` was cleared."""
        self.open.set()
        self._admit()

    def stall(self) -> None:
        """Stop serving the current weights: every request waits for the next update, or for its
        deadline.
        """
        self.scheduler.update(NO_VERSION)

    async def score(self, request: wire.GenerateRequest) -> GenerationOutput:
        """Score a context."""
        if self.scheduler.version < max(request.min_version, 0):
            return GenerationOutput(
                error=f"no weights of version {request.min_version} or later to score with"
            )
        tokens = request.token_ids.array().tolist()
        k = request.prompt_top_k
        if len(tokens) < 2:
            no_values = np.zeros((0, k), np.float32)
            no_scores = np.zeros(0, np.float32)
            return ContextScores(no_scores, no_values.astype(np.int32), no_values).output_for(
                request
            )
        try:
            reply = await self.ask_scores(tokens, k)
            of_context = read_scores(reply, len(tokens))
            scores = ContextScores(of_context, *read_top(reply, len(tokens), k))
        except (SGLangRequestError, ConnectionError) as error:
            return GenerationOutput(error=str(error))
        if not scores.is_finite:
            return GenerationOutput(error="the model's logits are not finite")
        return scores.output_for(request)

    async def ask_scores(self, tokens: Sequence[int], k: int) -> dict[str, Any]:
        """Return the server's answer for a context, with the k likeliest tokens.

        Raises:
            SGLangRequestError, ConnectionError: if the server does not answer.
        """
        assert self.api is not None
        body = score_body(uuid.uuid4().hex, tokens, k, f"weights-{self.loads}")
        return await self.api.post("/generate", body, SCORE_TIMEOUT_S)

    def count(self, output: GenerationOutput) -> GenerationOutput:
        """Count an answer and return it."""
        self._finished[output.finish_reason] += 1
        self._generated += len(output.token_ids)
        return output

    def stats(self) -> EngineStats:
        """See ``Engine.stats``."""
        now = time.monotonic()
        num_running = self.scheduler.num_running
        return EngineStats(
            running=num_running,
            waiting=self.scheduler.num_waiting,
            slots=self._slots,
            busy_s=self._busy_s + (now - self._busy_since if num_running else 0.0),
            generated_tokens=self._generated,
            prefill_tokens=self._prefilled,
            prefix_hit_tokens=self._hits,
            finished=dict(self._finished),
            pause_s=self.pause_s,
        )

    # ---------------------------------------------------------------------------------------------
    # one request

    def _admit(self) -> None:
        """Send what may run now; run again at the next deadline."""
        now = time.monotonic()
        for job in self.scheduler.expire(now):
            self._end(self._requests[job.request_id], "deadline")
        if self.open.is_set():
            for start in self.scheduler.admit(now):
                if self.scheduler.num_running == 1:
                    self._busy_since = now
                self._spawn(self._run(self._requests[start.job.request_id]))
            # SGLang does not say how far a request is
            yielding = self.scheduler.preempt(now, lambda _: 0)
            if yielding is not None:
                self._end(self._requests[yielding.request_id], "abort")
        if self._timer is not None:
            self._timer.cancel()
        times = (self.scheduler.next_deadline(), self.scheduler.next_preemption(now))
        due_at = min((time for time in times if time is not None), default=None)
        loop = asyncio.get_running_loop()
        waits = due_at is not None and not self._closed
        self._timer = (
            loop.call_later(max(0.0, due_at - now), self._admit)
            if due_at is not None and waits
            else None
        )

    def _end(self, running: RunningRequest, reason: wire.FinishReason) -> None:
        """End a request early: a waiting one at once, a running one when the server has returned
        its partial output.
        """
        running.end(reason)
        if running.job.slot < 0:
            self.scheduler.abort(running.job.request_id)
            self._answer(running, running.output(reason))
        elif running.rid and self.api is not None:
            self._spawn(self._recall(running, self.api))

    async def _recall(self, running: RunningRequest, api: SGLangClient) -> None:
        """Abort a call; on timeout answer with the output so far. The server cannot return while
        loading weights.
        """
        rid = running.rid
        left_s = RETURN_WITHIN_S
        while running.rid == rid and left_s > 0:
            await api.abort(rid)
            running.quiet.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ABORT_AGAIN_S):
                    await running.quiet.wait()
            left_s -= 0.0 if self.updating.locked() else ABORT_AGAIN_S
        if running.rid == rid and running.ended is not None and not running.answer.done():
            log.error(
                "SGLang did not return aborted request %s within %g s",
                running.job.request_id,
                RETURN_WITHIN_S,
            )
            running.answer.set_result(running.output(running.ended))

    async def _run(self, running: RunningRequest) -> None:
        """Run one request from its slot to its answer; each weight update adds a leg."""
        try:
            output = await self._legs(running)
        except SGLangRequestError as error:
            output = GenerationOutput(error=str(error))
        except ConnectionError as error:
            if not running.answer.done():
                running.answer.set_exception(RuntimeError(str(error)))
            output = GenerationOutput(error=str(error))
        except Exception as error:  # a malformed answer fails this request alone
            log.exception("request %s failed", running.job.request_id)
            output = GenerationOutput(
                error=f"SGLang's answer cannot be read: {type(error).__name__}: {error}"
            )
        finally:
            if running.job.slot >= 0:
                self.scheduler.finish(running.job.slot, None)
            if not self.scheduler.num_running:
                self._busy_s += time.monotonic() - self._busy_since
        self._answer(running, output)
        self._admit()

    async def _legs(self, running: RunningRequest) -> GenerationOutput:
        assert self.api is not None
        sampling = running.request.sampling
        grammar = ""
        if sampling.guides and self.tokenizer is not None:
            grammar = GuideCompiler(self.tokenizer).grammar(sampling.guides)
        while True:
            await self._allowed(running)
            if running.ended is not None:
                return running.output(running.ended)
            running.rid = uuid.uuid4().hex
            running.sent_by = self.scheduler.version
            running.forbidden = frozenset()
            loads = self.loads
            sampling = running.request.sampling
            body = generate_body(
                running.rid,
                running.context(),
                sampling,
                limit=running.left,
                namespace=f"weights-{loads}",
                grammar=grammar,
            )
            try:
                reply = await self.api.post("/generate", body)
            finally:
                running.rid = ""
                running.quiet.set()
            leg = read_leg(reply, running.request.sampling)
            self._prefilled += max(0, leg.prompt_tokens - leg.cached_tokens)
            self._hits += leg.cached_tokens
            whole = running.add(leg)
            if running.stopped:
                return running.output("stop")
            if running.ended is not None:
                return running.output(running.ended)
            if leg.reason != "abort" and whole:
                return running.output(leg.reason)
            if whole and not self.updating.locked() and loads == self.loads:
                return running.output("abort")  # aborted by the server itself
            if not running.left:
                return running.output("length")
            if is_reshaped(sampling):
                running.start_again()

    async def _allowed(self, running: RunningRequest) -> None:
        """Return once the request may be sent or must end."""
        if self.open.is_set() or running.ended is not None:
            return
        waits = [
            asyncio.ensure_future(self.open.wait()),
            asyncio.ensure_future(running.over.wait()),
        ]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    def _answer(self, running: RunningRequest, output: GenerationOutput) -> None:
        if self._requests.get(running.job.request_id) is running:
            del self._requests[running.job.request_id]
        if not running.answer.done():
            running.answer.set_result(output)
