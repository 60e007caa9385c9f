"""Streams a request of the engine ``vllm``: turns vLLM's deltas into pieces and one final output."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rlearner_text.openai.token_events import TokenEvent, TokenListener, TopLogprobs


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Tokens from ``start`` to before ``end``, sampled under the label ``version``; like vLLM's own
    class.
    """

    version: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class SampledLogprobs:
    """Logprobs of the sampled tokens alone."""

    logprobs: Sequence[float]


@dataclass(frozen=True, slots=True)
class FinalCompletion:
    """A finished request in the form of vLLM's final-only output; see
    ``rollout.engines.vllm.conversion.output_of``.
    """

    token_ids: Sequence[int]
    logprobs: SampledLogprobs
    finish_reason: str | None
    weight_versions: Sequence[Any] | None


class CompletionStream:
    """The stream of one request.

    Args:
        greedy: report logprobs as 0, see ``rollout.engines.base.GenerationOutput``.
        good: returns whether tokens of the load with this label may be sent, once that is known.
    """

    def __init__(
        self, tap: TokenListener, *, greedy: bool, good: Callable[[str], Awaitable[bool]]
    ) -> None:
        self._tap = tap
        self._greedy = greedy
        self._good = good
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._top: list[TopLogprobs] = []
        self._told = 0
        self._stopped = False

    async def take(self, completion: Any, spans: Sequence[Any]) -> None:
        """Take a delta and send tokens as far as their versions are known; waits for the probe of
        new weights.

        Args:
            completion: CompletionOutput with flat logprobs: at each position the sampled token's,
                then the likeliest.
            spans: of all tokens so far.
        """
        flat = completion.logprobs
        for at, token in enumerate(completion.token_ids):
            start = flat.start_indices[at]
            end = flat.end_indices[at]
            self._token_ids.append(token)
            self._logprobs.append(flat.logprobs[start])
            self._top.append(
                likeliest(
                    flat.token_ids[start:end], flat.logprobs[start:end], self._tap.top_logprobs
                )
            )
        for span in spans:
            await self._tell(span.version, min(span.end, len(self._token_ids)))

    def whole(self, last: Any) -> FinalCompletion:
        """Return the whole request, given its last delta."""
        logprobs = SampledLogprobs(self._logprobs)
        return FinalCompletion(self._token_ids, logprobs, last.finish_reason, last.weight_versions)

    async def _tell(self, version: str, end: int) -> None:
        if end <= self._told or self._stopped:
            return
        new = slice(self._told, end)
        logprobs = self._logprobs[new]
        if not all(map(math.isfinite, logprobs)) or not await self._good(version):
            self._stopped = True  # the request ends with an error, or without these tokens
            return
        self._told = end
        reported = [0.0] * len(logprobs) if self._greedy else logprobs
        top = self._top[new] if self._tap.top_logprobs else ()
        self._tap.on_tokens(
            TokenEvent(self._token_ids[new], reported, int(version.partition(":")[2]), top)
        )


def likeliest(token_ids: Sequence[int], logprobs: Sequence[float], k: int) -> TopLogprobs:
    """Return the k likeliest of vLLM's tokens at one position, descending, without those that were
    cut off.
    """
    found = zip(token_ids, logprobs, strict=True)
    pairs = {token: value for token, value in found if math.isfinite(value)} if k else {}
    return sorted(pairs.items(), key=lambda pair: -pair[1])[:k]
