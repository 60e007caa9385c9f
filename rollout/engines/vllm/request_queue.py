"""Queues the requests of the engine ``vllm``, so that ``rollout.scheduler`` decides and not vLLM."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any, Literal

from broker.contract import wire
from rlearner_text.guided_decoding import GuideCompiler
from rlearner_text.openai.token_events import TokenListener
from rollout.engines.base import EngineConfig, EngineStats, GenerationOutput
from rollout.engines.hf.logit_offsets import is_reshaped
from rollout.engines.vllm.completion_stream import CompletionStream
from rollout.engines.vllm.conversion import NOT_FINITE, output_of, sampling_fields
from rollout.engines.vllm.llm_client import as_deltas, final_only, first_line
from rollout.engines.vllm.weight_loader import VLLMWeightLoader
from rollout.job_queue import GenerationJob
from rollout.scheduler import Scheduler

Spawn = Callable[[Coroutine[Any, Any, None]], None]


@dataclass(eq=False, slots=True)
class QueuedRequest:
    """A request that waits or runs.

    Attributes:
        ended_by: why this engine ended it; None if it did not.
        again: whether to start over, because it had no token yet when new weights arrived.
        tap: listener for its tokens.
    """

    request: wire.GenerateRequest
    job: GenerationJob
    answer: asyncio.Future[GenerationOutput]
    ended_by: Literal["abort", "deadline"] | None = None
    again: bool = False
    tap: TokenListener | None = None


class VLLMRequestQueue:
    """Waiting requests, and those that run in vLLM.

    Args:
        spawn: runs a coroutine in the background.

    Attributes:
        held: start no requests while the weights change.
        pause_s: seconds in which generation paused.
    """

    def __init__(self, config: EngineConfig, spawn: Spawn) -> None:
        section = config.section
        self._max_context = section.max_context_tokens
        self.scheduler = Scheduler(
            num_slots=section.max_running,
            max_running=section.max_running,
            prefix_cache=False,
            version=config.policy_version,
            preempt_after_s=section.preempt_after_s,
        )
        self.held = False
        self.pause_s = 0.0
        self._spawn = spawn
        self._runs: dict[str, QueuedRequest] = {}
        self._loading: VLLMWeightLoader | None = None  # None before start and after close
        self._timer: asyncio.TimerHandle | None = None
        self._due = float("inf")
        self._busy_since = 0.0
        self._busy_s = 0.0
        self._generated = self._prefilled = self._hits = 0
        self._finished: Counter[str] = Counter()

    def open(self, loading: VLLMWeightLoader) -> None:
        """Start requests in this vLLM from now on."""
        self._loading = loading

    def close(self) -> None:
        """Start no more requests and fail those that wait or run."""
        self._loading = None
        if self._timer is not None:
            self._timer.cancel()
        self.fail(RuntimeError("the engine was closed"))

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._runs

    async def run(
        self, request: wire.GenerateRequest, tap: TokenListener | None = None
    ) -> GenerationOutput:
        """Run a valid request to its end."""
        job = GenerationJob.of(request, time.monotonic())
        run = QueuedRequest(request, job, asyncio.get_running_loop().create_future(), tap=tap)
        self._runs[request.request_id] = run
        self.scheduler.submit(job)
        self._admit()
        try:
            return await run.answer
        finally:
            if not run.answer.done() or run.answer.cancelled():  # cancelled by the caller
                self.abort(request.request_id)

    def abort(self, request_id: str) -> None:
        """End a request with its output so far; ignore an unknown one."""
        run = self._runs.get(request_id)
        if run is None:
            return
        job = self.scheduler.abort(request_id)
        if job is not None and job.slot < 0:
            self._answer(run, GenerationOutput(finish_reason="abort"))
        else:
            self._end(run, "abort")

    def serve(self, version: int) -> None:
        """Serve requests with the weights of this version; abort those that require a newer one."""
        self.stall(version)
        self._admit()

    def stall(self, version: int) -> None:
        """Set the version as ``serve`` does, without starting requests."""
        for job in self.scheduler.update(version):
            self._end(self._runs[job.request_id], "abort")

    def resume(self) -> None:
        """Start requests again after they were held."""
        self.held = False
        self._admit()

    async def start_over(self) -> None:
        """Restart the requests that have no token yet."""
        if self._loading is not None and (
            tokenless := self._loading.asking.tokenless(list(self._runs))
        ):
            for request_id in tokenless:
                self._runs[request_id].again = True
            await self._loading.llm.abort(tokenless)

    def fail(self, error: Exception) -> None:
        """Fail every unanswered request with this error."""
        for run in list(self._runs.values()):
            fail_future(run.answer, error)

    def count(self, output: GenerationOutput) -> GenerationOutput:
        """Count an answer and return it."""
        self._finished[output.finish_reason] += 1
        self._generated += len(output.token_ids)
        return output

    def stats(self) -> EngineStats:
        """See ``Engine.stats``."""
        running = self.scheduler.num_running
        return EngineStats(
            running=running,
            waiting=self.scheduler.num_waiting,
            slots=self.scheduler.max_running,
            busy_s=self._busy_s + (time.monotonic() - self._busy_since if running else 0.0),
            generated_tokens=self._generated
            + (self._loading.asking.in_flight_tokens() if self._loading is not None else 0),
            prefill_tokens=self._prefilled,
            prefix_hit_tokens=self._hits,
            finished=dict(self._finished),
            pause_s=self.pause_s,
        )

    # ---------------------------------------------------------------------------------------------
    # one request

    def _admit(self) -> None:
        """End jobs past their deadline and start waiting ones."""
        if (loading := self._loading) is None:
            return
        now = time.monotonic()
        for job in self.scheduler.expire(now):
            run = self._runs[job.request_id]
            if job.slot < 0:
                self._answer(run, GenerationOutput(finish_reason="deadline"))
            else:
                self._end(run, "deadline")
        if not self.held:
            num_before = self.scheduler.num_running
            for start in self.scheduler.admit(now):
                self._spawn(self._drive(loading, self._runs[start.job.request_id]))
            if not num_before and self.scheduler.num_running:
                self._busy_since = now
            yielding = self.scheduler.preempt(
                now, lambda job: loading.asking.generated(job.request_id)
            )
            if yielding is not None:
                self._end(self._runs[yielding.request_id], "abort")
        self._arm(now)

    def _arm(self, now: float) -> None:
        """Set the timer for the next deadline, or for the next request that another makes way for."""
        times = (self.scheduler.next_deadline(), self.scheduler.next_preemption(now))
        due_at = min((time for time in times if time is not None), default=None)
        if due_at is None or (self._timer is not None and self._due <= due_at):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._due = due_at
        self._timer = asyncio.get_running_loop().call_later(
            max(0.0, due_at - now) + 0.001, self._ring
        )

    def _ring(self) -> None:
        self._timer = None
        self._admit()

    async def _drive(self, loading: VLLMWeightLoader, run: QueuedRequest) -> None:
        """Run one request from its start to its answer."""
        try:
            output = await self._sample(loading, run)
        except asyncio.CancelledError:
            fail_future(run.answer, RuntimeError("the engine was closed"))
            raise
        except Exception as error:  # noqa: BLE001 - from vLLM: an invalid request, or a failed engine
            if loading.llm.errored:
                fail_future(run.answer, RuntimeError(f"the engine stopped: {first_line(error)}"))
            output = GenerationOutput(error=f"vLLM rejected the request: {first_line(error)}")
        self.scheduler.finish(run.job.slot, None)
        if not self.scheduler.num_running:
            self._busy_s += time.monotonic() - self._busy_since
        self._answer(run, output)
        self._admit()

    async def _sample(self, loading: VLLMWeightLoader, run: QueuedRequest) -> GenerationOutput:
        from vllm import SamplingParams
        from vllm.sampling_params import StructuredOutputsParams

        request = run.request
        prompt: list[int] = run.job.tokens.tolist()
        fields = sampling_fields(
            request.sampling, len(prompt), self._max_context, loading.opened.end_ids
        )
        if request.sampling.guides:
            assert loading.opened.tokenizer is not None, "see reshaping.problem"
            grammar = GuideCompiler(loading.opened.tokenizer).grammar(request.sampling.guides)
            fields["structured_outputs"] = StructuredOutputsParams(grammar=grammar)
        if run.tap is not None:
            fields["logprobs"] = run.tap.top_logprobs
        while True:
            run.again = False
            tap = run.tap
            greedy = request.sampling.temperature == 0
            telling = (
                None if tap is None else CompletionStream(tap, greedy=greedy, good=loading.good)
            )
            params = SamplingParams(**fields, **(final_only() if telling is None else as_deltas()))
            listener = None if telling is None else telling.take
            final = await loading.asking.ask(
                prompt, params, request.request_id, lambda: run.ended_by is not None, listener
            )
            if not run.again or run.ended_by is not None:
                break
        completion = final.outputs[0] if telling is None else telling.whole(final.outputs[0])
        if run.ended_by is not None and not completion.token_ids:
            return GenerationOutput(finish_reason=run.ended_by)
        wrong = await loading.wrong_since(completion)
        sampling = request.sampling
        cached = final.num_cached_tokens
        output = output_of(completion, cached, sampling.temperature, wrong, is_reshaped(sampling))
        loading.poisoned |= output.error == NOT_FINITE
        self._hits += output.prefix_hit_tokens
        self._prefilled += len(prompt) - output.prefix_hit_tokens
        if output.finish_reason == "abort" and run.ended_by is not None:
            return replace(output, finish_reason=run.ended_by)
        return output

    def _end(self, run: QueuedRequest, why: Literal["abort", "deadline"]) -> None:
        if run.ended_by is None and self._loading is not None:
            run.ended_by = why
            self._spawn(self._loading.llm.abort(run.request.request_id))

    def _answer(self, run: QueuedRequest, output: GenerationOutput) -> None:
        if self._runs.get(run.request.request_id) is run:
            del self._runs[run.request.request_id]
        self.count(output)
        if not run.answer.done():
            run.answer.set_result(output)


def fail_future(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
        future.exception()  # mark as retrieved: awaiting raises it again
