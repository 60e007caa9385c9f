"""Logit offsets of a request: penalties, biases, and minus infinity for tokens its guide forbids."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import numpy as np
import numpy.typing as npt

from broker.contract import wire
from rlearner_text.guided_decoding import GuideCompiler, GuideError, GuideMatcher
from rlearner_text.tokenizer import Tokenizer

# A token counts as drawn from the policy's own distribution if reshaping moved at most this much
# probability.
MOVED: Final = 1e-3


def is_reshaped(sampling: wire.SamplingParams) -> bool:
    """Return whether a request may change the distribution beyond temperature and cut-offs."""
    return bool(
        sampling.frequency_penalty
        or sampling.presence_penalty
        or sampling.logit_bias
        or sampling.guides
    )


def offsets_problem(
    sampling: wire.SamplingParams, vocab_size: int, tokenizer: Tokenizer | None
) -> str:
    """Return why a request cannot be reshaped, in one line; empty if it can."""
    if sampling.guides and tokenizer is None:
        return "guides need a tokenizer, and the model's folder has none"
    odd = next((token for token in sampling.logit_bias if token >= vocab_size), None)
    return (
        ""
        if odd is None
        else f"logit_bias: token id {odd} is outside the model's vocabulary of {vocab_size}"
    )


class LogitOffsets:
    """Logit offsets of one request.

    Args:
        vocab_size: width of the logits.
        ends: tokens that end the output; a guide allows them once the answer is complete.
        guides: of the model; None if it has no tokenizer.

    Attributes:
        flags: for every sampled token whether it was drawn from a reshaped distribution.

    Raises:
        GuideError: if the guide cannot be compiled to a grammar.
    """

    def __init__(
        self,
        sampling: wire.SamplingParams,
        vocab_size: int,
        ends: Collection[int],
        guides: GuideCompiler | None,
    ) -> None:
        self._sampling = sampling
        self._ends = list(ends)
        self._counts: npt.NDArray[np.float32] = np.zeros(vocab_size, np.float32)
        self._bias: npt.NDArray[np.float32] = np.zeros(vocab_size, np.float32)
        self._bias[list(sampling.logit_bias)] = list(sampling.logit_bias.values())
        self._matcher: GuideMatcher | None = None
        if sampling.guides:
            assert guides is not None, "see problem"
            self._matcher = guides.matcher(sampling.guides)
        self.flags: list[bool] = []

    def offsets(self) -> npt.NDArray[np.float32]:
        """Return what to add to the logits of the next token, (vocabulary,).

        Raises:
            GuideError: if the guide allows no further token.
        """
        sampling = self._sampling
        counts = self._counts
        offsets = (
            self._bias
            - sampling.frequency_penalty * counts
            - sampling.presence_penalty * (counts > 0)
        )
        if self._matcher is not None:
            allowed = self._matcher.allowed()
            if self._matcher.complete:
                allowed[self._ends] = True
            if not allowed.any():
                raise GuideError("the guide allows no token")
            offsets[~allowed] = -np.inf
        return np.asarray(offsets, np.float32)

    def take(self, token: int, flag: bool) -> None:
        """Record a sampled token."""
        self.flags.append(flag)
        self._counts[token] += 1
        if self._matcher is not None and token not in self._ends:
            self._matcher.take(token)
