"""State of one request of the engine ``sglang`` while it waits or runs; no I/O."""

from __future__ import annotations

import asyncio
import itertools

from broker.contract import wire
from rollout.engines.base import NO_VERSION, GenerationOutput
from rollout.engines.hf.logit_offsets import is_reshaped
from rollout.engines.sglang.client import GenerateLeg, merge_runs, shift_runs, truncate_runs
from rollout.engines.stop_strings import StopStrings
from rollout.job_queue import GenerationJob


class RunningRequest:
    """A request with its output so far.

    Attributes:
        ended: why it must end early; None while it may continue. Sets ``over``.
        rid: id of the current call, empty if there is none.
        sent_by: the version served when that call was sent.
        quiet: set when that call has returned.
        stopped: whether a stop string that began in an earlier call was found.
        forbidden: versions whose tokens in the current call are dropped because their weights
            failed.
        answer: result for the caller.

    Args:
        stops: finds stop strings that span two calls, which the server cannot see.
    """

    def __init__(
        self,
        request: wire.GenerateRequest,
        job: GenerationJob,
        max_context_tokens: int,
        stops: StopStrings | None,
    ) -> None:
        self.request = request
        self.job = job
        self.ended: wire.FinishReason | None = None
        self.over = asyncio.Event()
        self.rid = ""
        self.sent_by = NO_VERSION
        self.quiet = asyncio.Event()
        self.stopped = False
        self.forbidden: frozenset[int] = frozenset()
        self.answer: asyncio.Future[GenerationOutput] = asyncio.get_running_loop().create_future()
        self._stops = stops
        self._limit = min(request.sampling.max_tokens, max_context_tokens - len(job.tokens))
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._runs: list[tuple[int, int]] = []
        self._hits = 0

    @property
    def left(self) -> int:
        """Number of tokens that may still be sampled."""
        return self._limit - len(self._token_ids)

    def context(self) -> list[int]:
        """Return prompt and output so far."""
        return [*self.job.tokens.tolist(), *self._token_ids]

    def end(self, reason: wire.FinishReason) -> None:
        """Request an early end; the first reason counts."""
        self.ended = self.ended or reason
        self.over.set()

    def add(self, leg: GenerateLeg) -> bool:
        """Append a call's tokens up to the first forbidden one; return whether all were appended."""
        num_before = len(self._token_ids)
        if not num_before:
            self._hits = min(leg.cached_tokens, len(self.job.tokens))
        allowed = list(
            itertools.takewhile(lambda run: run[0] not in self.forbidden, leg.version_runs)
        )
        num_taken = sum(count for _, count in allowed)
        self._runs += shift_runs(allowed, self.sent_by)
        self._token_ids += leg.token_ids[:num_taken]
        self._logprobs += leg.logprobs[:num_taken]
        if self._stops is not None and num_before:
            self._cut(self._stops, num_before)
        return num_taken == len(leg.token_ids)

    def _cut(self, stops: StopStrings, num_before: int) -> None:
        """Cut the output after a stop string that began before the last call, if there is one."""
        for count in range(
            num_before + 1, min(num_before + stops.window, len(self._token_ids)) + 1
        ):
            if stops.hit(self._token_ids[:count]):
                self._token_ids = self._token_ids[:count]
                self._logprobs = self._logprobs[:count]
                self._runs = truncate_runs(self._runs, count)
                self.stopped = True
                return

    def output(self, reason: wire.FinishReason) -> GenerationOutput:
        """Return the whole output."""
        # SGLang does not report which tokens were affected
        flags = [True] * len(self._token_ids) if is_reshaped(self.request.sampling) else ()
        runs = merge_runs(self._runs)
        return GenerationOutput(
            self._token_ids, self._logprobs, runs, reason, self._hits, reshaped=flags
        )

    def start_again(self) -> None:
        """Drop the output: grammars and penalties start at its first token, and a call knows only
        its own tokens.
        """
        self._token_ids = []
        self._logprobs = []
        self._runs = []
