"""The engine ``random``: a baseline and a test engine without model and torch."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import random
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Final

import numpy as np

from broker.contract import wire
from broker.errors import UserError
from rlearner_text.guided_decoding import GuideCompiler, GuideError
from rlearner_text.hub import read_json, tokenizer_folder
from rlearner_text.openai.token_events import TokenEvent, TokenListener
from rlearner_text.tokenizer import Tokenizer
from rollout.engines.args import RandomArgs
from rollout.engines.base import EngineConfig, EngineStats, GenerationOutput
from rollout.engines.hf.logit_offsets import MOVED, LogitOffsets, is_reshaped
from rollout.engines.hf.logit_offsets import offsets_problem as reshaping_problem
from rollout.engines.stop_strings import StopStrings
from rollout.engines.weightless import VERSION, WeightlessEngine

_KEY: Final = "model.path"


class RandomEngine(WeightlessEngine):
    """See ``rollout.engines.base.Engine``.

    Without ``choices`` every token is uniform over the vocabulary. With them a whole choice is
    drawn uniformly, followed by the end token; the first token has its logprob and the others 0, so
    the sum over a reply is right. Temperature, top-k, top-p and min-p have no effect. Penalties,
    biases and guides reshape the distribution, except with choices.
    """

    name = "random"
    tells_top = False

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._args = RandomArgs.model_validate(config.section.engine_args)
        self._running: dict[str, asyncio.Event] = {}  # set to abort the request
        self._busy_s = 0.0
        self._busy_since = 0.0
        self._choices: list[list[int]] = []
        self._tokenizer: Tokenizer
        self._guides: GuideCompiler

    async def start(self) -> None:
        path = self._config.model_path
        self._tokenizer = Tokenizer.load(path, trust_remote_code=self._config.trust_remote_code)
        self._guides = GuideCompiler(self._tokenizer)
        if self._args.choices:
            end = end_token(self._tokenizer, path)
            self._choices = [
                [*self._tokenizer.encode(choice), end] for choice in self._args.choices
            ]

    async def generate(
        self, request: wire.GenerateRequest, tap: TokenListener | None = None
    ) -> GenerationOutput:
        if (refused := self._refused(request, self._running)) is not None:
            return refused
        aborted = self._running[request.request_id] = asyncio.Event()
        deadline = time.monotonic() + request.deadline_s
        if len(self._running) == 1:
            self._busy_since = time.monotonic()
        try:
            return self._count(await self._produce(request, deadline, aborted, tap))
        finally:
            del self._running[request.request_id]
            if not self._running:
                self._busy_s += time.monotonic() - self._busy_since

    def abort(self, request_id: str) -> None:
        if request_id in self._running:
            self._running[request_id].set()

    def stats(self) -> EngineStats:
        now = time.monotonic()
        return EngineStats(
            running=len(self._running),
            slots=self._config.section.max_running,
            busy_s=self._busy_s + (now - self._busy_since if self._running else 0.0),
            generated_tokens=self._generated,
            finished=dict(self._finished),
        )

    async def close(self) -> None:
        for event in self._running.values():
            event.set()
        self._closed.set()

    async def _produce(
        self,
        request: wire.GenerateRequest,
        deadline: float,
        aborted: asyncio.Event,
        tap: TokenListener | None,
    ) -> GenerationOutput:
        """Draw the whole reply, then wait for its delay and cut off what did not fit into the time."""
        reshaping = None
        if is_reshaped(request.sampling):
            try:
                reshaping = self._reshaping(request.sampling)
                tokens, logprobs, reason = self._draw_reshaped(request, reshaping)
            except GuideError as error:
                return GenerationOutput(error=f"guide: {error}")
        else:
            tokens, logprobs, reason = self._draw(request)
        allowed = len(tokens)
        if tap is not None:
            pieces = [
                TokenEvent([token], [logprob], VERSION)
                for token, logprob in zip(tokens, logprobs, strict=True)
            ]
            allowed = await self._tell(pieces, deadline, aborted, tap)
        elif self._args.delay_s:
            began = time.monotonic()
            need = self._args.delay_s * len(tokens)
            remaining_s = max(0.0, deadline - began)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(aborted.wait(), min(need, remaining_s))
            # otherwise all tokens, even if the timer fired slightly early
            if aborted.is_set() or remaining_s < need:
                allowed = min(
                    len(tokens), int((time.monotonic() - began) / self._args.delay_s + 1e-3)
                )
        if aborted.is_set() or allowed < len(tokens):
            reason = "abort" if aborted.is_set() else "deadline"
            tokens = tokens[:allowed]
            logprobs = logprobs[:allowed]
        flags = reshaping.flags[: len(tokens)] if reshaping is not None else ()
        return GenerationOutput(
            tokens, logprobs, [(VERSION, len(tokens))] if tokens else [], reason, reshaped=flags
        )

    def _reshaping(self, sampling: wire.SamplingParams) -> LogitOffsets:
        if self._choices:
            raise GuideError("engine random with choices has no distribution to reshape")
        if reason := reshaping_problem(sampling, self._tokenizer.vocab_size, self._tokenizer):
            raise GuideError(reason)
        return LogitOffsets(
            sampling, self._tokenizer.vocab_size, self._ends(sampling), self._guides
        )

    async def _tell(
        self,
        pieces: Sequence[TokenEvent],
        deadline: float,
        aborted: asyncio.Event,
        tap: TokenListener,
    ) -> int:
        """Stream the pieces one by one, each after its delay, and return how many fit into the
        time.
        """
        due_at = time.monotonic()
        for count, piece in enumerate(pieces):
            due_at += self._args.delay_s
            with contextlib.suppress(TimeoutError):
                if (remaining_s := min(due_at, deadline) - time.monotonic()) > 0:
                    await asyncio.wait_for(aborted.wait(), remaining_s)
            if aborted.is_set() or due_at > deadline:
                return count
            tap.on_tokens(piece)
        return len(pieces)

    def _draw(
        self, request: wire.GenerateRequest
    ) -> tuple[list[int], list[float], wire.FinishReason]:
        sampling = request.sampling
        rng, limit = self._start(request)
        if not self._choices:
            return self._uniform(rng, sampling, limit)
        share: defaultdict[tuple[int, ...], float] = defaultdict(float)
        for choice in self._choices:  # choices with a common prefix may be equal once cut
            share[tuple(choice[:limit])] += 1 / len(self._choices)
        drawn = rng.choice(self._choices)
        tokens = drawn[:limit]
        logprobs = [math.log(min(1.0, share[tuple(tokens)]))] + [0.0] * (len(tokens) - 1)
        return tokens, logprobs, "stop" if len(tokens) == len(drawn) else "length"

    def _start(self, request: wire.GenerateRequest) -> tuple[random.Random, int]:
        """Return a request's random generator and its token limit."""
        sampling = request.sampling
        prompt = len(request.token_ids.array())
        seed = (
            sampling.seed if sampling.seed is not None else int.from_bytes(os.urandom(8), "little")
        )
        limit = min(sampling.max_tokens, self._config.section.max_context_tokens - prompt)
        # seeded by position, too, as in every engine
        return random.Random(f"{seed} {prompt}"), limit

    def _ends(self, sampling: wire.SamplingParams) -> set[int]:
        own = sampling.ignore_eos and not sampling.guides
        return {*(() if own else self._tokenizer.eos_token_ids), *sampling.stop_token_ids}

    def _draw_reshaped(
        self, request: wire.GenerateRequest, reshaping: LogitOffsets
    ) -> tuple[list[int], list[float], wire.FinishReason]:
        """Draw like ``_uniform``, from equal logits plus the request's own offsets."""
        rng, limit = self._start(request)
        sampling = request.sampling
        size = self._tokenizer.vocab_size
        ends = self._ends(request.sampling)
        stops = StopStrings(self._tokenizer, sampling.stop) if sampling.stop else None
        tokens: list[int] = []
        logprobs: list[float] = []
        has_stopped = False
        while len(tokens) < limit and not has_stopped:
            weights = np.exp(reshaping.offsets().astype(np.float64))
            probs = weights / weights.sum()
            (token,) = rng.choices(range(size), cum_weights=probs.cumsum().tolist())
            reshaping.take(token, bool(np.abs(probs - 1 / size).sum() / 2 > MOVED))
            tokens.append(token)
            logprobs.append(math.log(probs[token]))
            has_stopped = token in ends or (stops is not None and stops.hit(tokens))
        return tokens, logprobs, "stop" if has_stopped else "length"

    def _uniform(
        self, rng: random.Random, sampling: wire.SamplingParams, limit: int
    ) -> tuple[list[int], list[float], wire.FinishReason]:
        size = self._tokenizer.vocab_size
        ends = self._ends(sampling)
        stops = StopStrings(self._tokenizer, sampling.stop) if sampling.stop else None
        tokens: list[int] = []
        has_stopped = False
        while len(tokens) < limit and not has_stopped:
            tokens.append(rng.randrange(size))
            has_stopped = tokens[-1] in ends or (stops is not None and stops.hit(tokens))
        return tokens, [-math.log(size)] * len(tokens), "stop" if has_stopped else "length"


def end_token(tokenizer: Tokenizer, path: str) -> int:
    """Return the token that ends a turn: the tokenizer's own eos token, else the first that the
    model declares.

    Raises:
        UserError: if the model has none.
    """
    names = read_json(
        tokenizer_folder(path) / "tokenizer_config.json", path, _KEY, missing_ok=True
    ).get("eos_token")
    text = names.get("content") if isinstance(names, dict) else names
    token_id = tokenizer.token_id(text) if isinstance(text, str) else None
    if token_id is None:
        token_id = next(iter(tokenizer.eos_token_ids), None)
    if token_id is None:
        raise UserError(
            f"model path {path!r}: engine random with choices needs a tokenizer with an end token"
        )
    return token_id
