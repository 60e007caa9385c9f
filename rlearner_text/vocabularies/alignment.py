"""Carries the logprobs of one tokenizer's tokens over to another's, for the same text.

Two tokenizers cut a text at different places. Between two places where both end a token, each has a
chunk of one or more tokens, whose logprobs add up to that of the chunk's text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rlearner_text.tokenizer import Tokenizer

INSIDE: Final = -1  # a token that ends inside a character
_REPLACEMENT: Final = "\ufffd"


def token_ends(tokenizer: Tokenizer, token_ids: Sequence[int]) -> list[int]:
    """Return how many characters of the text stand before the end of each token, (n,).

    A token that ends inside a character, as bytes of an emoji do, gets ``INSIDE``.
    """
    ends: list[int] = []
    # The first token of the window is decoded again with its successor: some tokenizers drop a
    # leading space.
    window = 0
    closed = 0
    num_chars = 0
    context = ""
    for index in range(len(token_ids)):
        text = tokenizer.decode(token_ids[window : index + 1], skip_special_tokens=False)
        if text.endswith(_REPLACEMENT):
            ends.append(INSIDE)
            continue
        num_chars += len(text) - len(context)
        ends.append(num_chars)
        window = closed
        closed = index + 1
        context = tokenizer.decode(token_ids[window:closed], skip_special_tokens=False)
    return ends


def spread_logprobs(
    ends: Sequence[int],
    logprobs: Sequence[float],
    other_ends: Sequence[int],
    other_logprobs: Sequence[float],
) -> list[float]:
    """Return the other tokenizer's logprobs in this one's tokens, (n,).

    The tokens of a chunk share its logprob in proportion to their own, equally if those are 0, so
    that the sum over each chunk is the other's and no value is above 0.

    Args:
        ends: of this tokenizer's n tokens, see ``token_ends``.
        logprobs: (n,) this model's.
        other_ends: of the other tokenizer's m tokens of the same text.
        other_logprobs: (m,) the other model's.

    Raises:
        ValueError: if the texts differ in length.
    """
    if list(ends[-1:]) != list(other_ends[-1:]):
        raise ValueError(f"the texts have {ends[-1:]} and {other_ends[-1:]} characters")
    common = {end for end in ends if end != INSIDE} & set(other_ends)
    spread: list[float] = []
    for chunk, other_chunk in zip(
        _cut_chunks(ends, logprobs, common),
        _cut_chunks(other_ends, other_logprobs, common),
        strict=True,
    ):
        total = sum(other_chunk)
        own = sum(chunk)
        if own < 0:
            spread += [total * logprob / own for logprob in chunk]
        else:
            spread += [total / len(chunk)] * len(chunk)
    return spread


def _cut_chunks(
    ends: Sequence[int], logprobs: Sequence[float], common: set[int]
) -> list[list[float]]:
    """Cut tokens behind the last one that ends at each common place."""
    last_at = {end: index for index, end in enumerate(ends) if end in common}
    chunks: list[list[float]] = [[]]
    for index, (end, logprob) in enumerate(zip(ends, logprobs, strict=True)):
        chunks[-1].append(logprob)
        if end in common and last_at[end] == index:
            chunks.append([])
    chunks.pop()
    return chunks
