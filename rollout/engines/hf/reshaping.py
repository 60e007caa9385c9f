"""What a request adds to the logits of its next token: penalties, biases, and minus infinity for what its guide does not allow."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import numpy as np
import numpy.typing as npt

from broker.contract import wire
from rlearner_text.guides import BadGuide, Guides, Matcher
from rlearner_text.tokenizer import Tokenizer

# A token counts as drawn from the policy's own distribution where reshaping moved at most this much of its probability.
MOVED: Final = 1e-3


def is_reshaped(sampling: wire.SamplingParams) -> bool:
    """Whether a request may change what tokens are drawn from, beyond temperature and cut-offs."""
    return bool(sampling.frequency_penalty or sampling.presence_penalty or sampling.logit_bias or sampling.guides)


def problem(sampling: wire.SamplingParams, vocab_size: int, tokenizer: Tokenizer | None) -> str:
    """Why a request cannot be reshaped so, in one line; empty when it can."""
    if sampling.guides and tokenizer is None:
        return "guides need a tokenizer, and the model's folder has none"
    odd = next((token for token in sampling.logit_bias if token >= vocab_size), None)
    return "" if odd is None else f"logit_bias: token id {odd} is outside the model's vocabulary of {vocab_size}"


class Reshaping:
    """The part of one request.

    Args:
        vocab_size: width of the logits.
        ends: tokens that end the output; a guide allows them where the answer is complete.
        guides: of the model; None where it has no tokenizer.

    Attributes:
        flags: for every token taken whether it was drawn from a reshaped distribution.

    Raises:
        BadGuide: no grammar can be made of the guide.
    """

    def __init__(self, sampling: wire.SamplingParams, vocab_size: int, ends: Collection[int], guides: Guides | None) -> None:
        self._sampling, self._ends = sampling, list(ends)
        self._counts: npt.NDArray[np.float32] = np.zeros(vocab_size, np.float32)
        self._bias: npt.NDArray[np.float32] = np.zeros(vocab_size, np.float32)
        self._bias[list(sampling.logit_bias)] = list(sampling.logit_bias.values())
        self._matcher: Matcher | None = None
        if sampling.guides:
            assert guides is not None, "see problem"
            self._matcher = guides.matcher(sampling.guides)
        self.flags: list[bool] = []

    def offsets(self) -> npt.NDArray[np.float32]:
        """To be added to the logits of the next token, (vocabulary,).

        Raises:
            BadGuide: the guide allows no token any more.
        """
        sampling, counts = self._sampling, self._counts
        made = self._bias - sampling.frequency_penalty * counts - sampling.presence_penalty * (counts > 0)
        if self._matcher is not None:
            allowed = self._matcher.allowed()
            if self._matcher.complete:
                allowed[self._ends] = True
            if not allowed.any():
                raise BadGuide("the guide allows no token")
            made[~allowed] = -np.inf
        return np.asarray(made, np.float32)

    def take(self, token: int, flag: bool) -> None:
        """A token was sampled."""
        self.flags.append(flag)
        self._counts[token] += 1
        if self._matcher is not None and token not in self._ends:
            self._matcher.take(token)
