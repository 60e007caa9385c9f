"""Scores of a context that was not sampled, as an engine computes them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from broker.contract import wire
from rollout.engines.base import GenerationOutput


@dataclass(frozen=True, eq=False)
class ContextScores:
    """Scores of each token of a context but the first, at temperature 1; n tokens, k candidates."""

    logprobs: npt.NDArray[np.float32]  # (n - 1,) of the tokens themselves
    top_ids: npt.NDArray[np.int32]  # (n - 1, k) the likeliest tokens at each position, descending
    top_logprobs: npt.NDArray[np.float32]  # (n - 1, k)

    @property
    def is_finite(self) -> bool:
        """Whether no value is NaN or infinite."""
        return bool(np.isfinite(self.logprobs).all() and np.isfinite(self.top_logprobs).all())

    def output_for(self, request: wire.GenerateRequest) -> GenerationOutput:
        """Return the columns that a request asks for."""
        output = GenerationOutput(finish_reason="stop")
        if request.prompt_top_k:
            output = replace(output, top_ids=self.top_ids, top_logprobs=self.top_logprobs)
        if request.prompt_logprobs:
            output = replace(output, prompt_logprobs=self.logprobs)
        return output
