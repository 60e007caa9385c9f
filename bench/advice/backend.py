"""A training backend that computes nothing and takes the time that the speeds say."""

from __future__ import annotations

import time
from collections.abc import Sequence

from bench.advice.plugins import speeds
from bench.scale.null import NullBackend
from learner.algorithm.samples import TrainSample


class PacedBackend(NullBackend):
    """See ``learner.backends.base.Backend``."""

    def forward_backward(self, samples: Sequence[TrainSample]) -> dict[str, float]:
        time.sleep(speeds().sample_s * len(samples))
        return super().forward_backward(samples)

    def step(self) -> dict[str, float]:
        time.sleep(speeds().step_s)
        return super().step()
