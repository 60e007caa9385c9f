"""What an engine tells of a request while it samples: the tokens as they come, for whoever listens in the same process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

Top = Sequence[tuple[int, float]]  # token ids and logprobs, the likeliest first


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens of one request, those that were sampled since the piece before.

    Attributes:
        token_ids: the stop token included.
        logprobs: of each, under the distribution that it was drawn from.
        version: the policy version that all of them came from.
        top: for each the likeliest tokens, see ``Tap``; empty where none were asked for.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    version: int
    top: Sequence[Top] = ()


@dataclass(frozen=True, slots=True)
class Tap:
    """Listens to one request.

    Attributes:
        told: called on the event loop with every piece, in order and all before the request is answered. It returns at once: the engine
            does not wait for whoever reads.
        top_logprobs: so many likeliest tokens at each place, of the distribution that was drawn from: after temperature and cut-offs, so
            tokens that were cut off are not among them. At temperature 0, which has no such distribution, at temperature 1.
    """

    told: Callable[[Piece], None]
    top_logprobs: int = 0
