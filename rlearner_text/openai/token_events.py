"""Streaming of sampled tokens from an engine to a listener in the same process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

# Token ids and logprobs, the likeliest first.
TopLogprobs = Sequence[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """Tokens of one request sampled since its previous piece.

    Attributes:
        token_ids: including the stop token.
        logprobs: of each token, under the distribution from which it was drawn.
        version: policy version of all of them.
        top: likeliest tokens at each position, see ``TokenListener``; empty if not requested.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    version: int
    top: Sequence[TopLogprobs] = ()


@dataclass(frozen=True, slots=True)
class TokenListener:
    """Listener to one request.

    Attributes:
        on_tokens: called on the event loop with every piece, in order, before the request is
            answered. It must return at once: the engine does not wait for readers.
        top_logprobs: number of likeliest tokens at each position, under the sampling distribution,
            after temperature and cut-offs, which exclude tokens. For temperature 0, at temperature
            1.
    """

    on_tokens: Callable[[TokenEvent], None]
    top_logprobs: int = 0
