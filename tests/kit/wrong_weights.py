"""Backends that offer wrong weights, and engines that load right ones wrongly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from broker.errors import OfferRefused
from learner.backends.torch import TorchBackend
from rollout.engines.hf.engine import HFEngine

NORM = "model.norm.weight"


class RenamingBackend(TorchBackend):
    """Offers a tensor under a name that the model does not have."""

    def shapes(self) -> dict[str, Tensor]:
        return _renamed(super().shapes())

    def weights(self) -> Mapping[str, Tensor]:
        return _renamed(super().weights())


def _renamed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        name.replace(NORM, "model.base_layer.norm.weight"): tensor
        for name, tensor in tensors.items()
    }


class ShiftedBackend(TorchBackend):
    """Trains with logprobs that plain attention does not give."""

    def logprobs(self, token_ids: Sequence[int] | npt.NDArray[np.generic]) -> Tensor:
        return super().logprobs(token_ids) - 0.5


class BrokenBackend(TorchBackend):
    """A weight becomes NaN in the first step."""

    def step(self) -> dict[str, float]:
        values = super().step()
        with torch.no_grad():
            dict(self.policy.module.named_parameters())[NORM][3] = torch.nan
        return values


class SkippingBackend(TorchBackend):
    """Every gradient holds infinity."""

    def step(self) -> dict[str, float]:
        parameter = dict(self.policy.module.named_parameters())[NORM]
        parameter.grad = torch.full_like(parameter, torch.inf)
        return super().step()


class ForgetfulEngine(HFEngine):
    """Computes other logprobs than the weights that it was given."""

    async def logprobs(self, token_ids: Sequence[int]) -> npt.NDArray[np.float32]:
        return await super().logprobs(token_ids) - np.float32(0.5)

    async def update_weights(self, *arguments: Any) -> float:
        raise OfferRefused(
            "probe: after loading, token 1 has logprob -9.000000, the learner's is -4.000000"
        )


class StrangeEngine(HFEngine):
    """Has another model than the run."""

    def weights(self) -> Mapping[str, Tensor]:
        return _renamed(super().weights())
