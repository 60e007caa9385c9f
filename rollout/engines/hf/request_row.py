"""State of one running request of the Hugging Face engine: tokens, cached prefix, stop conditions."""

from __future__ import annotations

import os

import numpy as np

from broker.contract.wire import FinishReason, SamplingParams
from rollout.engines.base import GenerationOutput
from rollout.engines.hf.logit_offsets import LogitOffsets
from rollout.engines.stop_strings import StopStrings
from rollout.job_queue import ENDED, GenerationJob, Tokens


class RequestRow:
    """A request in a slot.

    Attributes:
        length: number of known tokens, context and sampled.
        cached: leading tokens whose KV is in the slot; the others must still run.
        seed: random seed; drawn here if the request has none.
        reshaping: logit offsets; None: none.
        slot: where its KV is, also after it has ended, until another row starts there.
        source: a row whose prompt begins alike, whose KV this one waits for; None: it computes its
            own.
        num_shared: leading tokens that it takes over from there.
    """

    __slots__ = (
        "_end_ids",
        "_marks",
        "_num_prompt",
        "_stops",
        "cached",
        "job",
        "length",
        "logprobs",
        "num_shared",
        "params",
        "reshaping",
        "reused",
        "seed",
        "slot",
        "source",
        "tokens",
    )

    def __init__(
        self, job: GenerationJob, params: SamplingParams, reused: int, version: int, room: int, end_ids: frozenset[int],
        stops: StopStrings | None, reshaping: LogitOffsets | None = None,
    ) -> None:  # fmt: skip
        self.reshaping = reshaping
        self.source: RequestRow | None = None
        self.num_shared = 0
        self.job = job
        self.slot = job.slot
        self.params = params
        self.reused = reused
        self._num_prompt = self.length = len(job.tokens)
        self.cached = reused
        self.tokens: Tokens = np.empty(self.length + min(params.max_tokens, room), dtype=np.int32)
        self.tokens[: self.length] = job.tokens
        self.logprobs: list[float] = []
        self._marks = [(version, 0)]  # (version, index of the first token sampled with it)
        self._end_ids = request_end_tokens(params, end_ids)
        self._stops = stops
        self.seed = (
            int.from_bytes(os.urandom(8), "little")
            if params.seed is None
            else params.seed & (1 << 64) - 1
        )

    @property
    def has_ended(self) -> bool:
        """Whether its slot may be given to another row."""
        return self.job.slot == ENDED

    def add(self, token: int, logprob: float) -> FinishReason | None:
        """Append a sampled token; return the finish reason if the request ends with it."""
        self.tokens[self.length] = token
        self.length += 1
        self.logprobs.append(logprob)
        if token in self._end_ids:
            return "stop"
        if self._stops is not None and self._stops.hit(
            self.tokens[self._num_prompt : self.length].tolist()
        ):
            return "stop"
        return "length" if self.length == len(self.tokens) else None

    def new_version(self, version: int) -> None:
        """Record that later tokens come from other weights."""
        self._marks.append((version, len(self.logprobs)))

    def output(self, reason: FinishReason, error: str = "") -> GenerationOutput:
        """Return the output so far; an error has no tokens."""
        if reason == "error":
            return GenerationOutput(
                finish_reason="error", error=error, prefix_hit_tokens=self.reused
            )
        ends = [start for _, start in self._marks[1:]] + [len(self.logprobs)]
        runs = [
            (version, end - start)
            for (version, start), end in zip(self._marks, ends, strict=True)
            if end > start
        ]
        flags = self.reshaping.flags if self.reshaping is not None else ()
        sampled = self.tokens[self._num_prompt : self.length].tolist()
        return GenerationOutput(sampled, self.logprobs, runs, reason, self.reused, reshaped=flags)

    def kept(self) -> Tokens:
        """Return the tokens whose KV the slot holds."""
        return self.tokens[: self.cached]


def request_end_tokens(params: SamplingParams, end_ids: frozenset[int]) -> frozenset[int]:
    """Return the tokens that end an output. With a guide the end tokens always count, so that the
    output can end.
    """
    own = frozenset() if params.ignore_eos and not params.guides else end_ids
    return own | frozenset(params.stop_token_ids)
