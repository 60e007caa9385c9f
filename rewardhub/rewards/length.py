"""Penalizes long episodes, from 0 to -1 over the last ``cache_tokens`` before ``max_tokens``.

Yu et al., DAPO, arXiv 2503.14476, equation 13 ("soft overlong punishment"), by the tokens sampled
in the episode. ``algorithm.overlong_buffer`` is the same at the learner, for all domains and by
trajectory; use one of the two.
"""

from __future__ import annotations

from typing import Self

from pydantic import PositiveInt, model_validator

from broker.settings.config import Section
from rewardhub.rewards.base import Sample


class LengthArgs(Section):
    """Arguments of the reward ``length``."""

    harmless = ("max_tokens", "cache_tokens")

    max_tokens: PositiveInt  # from here on the penalty is -1
    cache_tokens: PositiveInt  # number of tokens before that, over which it grows

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.cache_tokens > self.max_tokens:
            raise ValueError(
                f"expected cache_tokens up to max_tokens ({self.max_tokens}), got "
                f"{self.cache_tokens}"
            )
        return self


class LengthReward:
    """Reward: 0 for a short episode, -1 for one that is too long."""

    Args = LengthArgs

    def __init__(self, args: LengthArgs) -> None:
        self._args = args

    def score(self, sample: Sample) -> float:
        """Return the reward of one episode, in [-1, 0]."""
        over = sample.num_tokens - (self._args.max_tokens - self._args.cache_tokens)
        return -min(max(over, 0) / self._args.cache_tokens, 1.0)
