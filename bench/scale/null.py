"""A training backend that computes nothing, so that only the learner's own work is measured."""

from __future__ import annotations

from collections.abc import Sequence

from learner.algorithm.samples import TrainSample
from learner.backends.torch import TorchBackend


class NullBackend(TorchBackend):
    """Takes samples and steps without a forward pass; the weights stay as they are."""

    def forward_backward(self, samples: Sequence[TrainSample]) -> dict[str, float]:
        return {}

    def step(self) -> dict[str, float]:
        return {"actor/lr": 0.0}
