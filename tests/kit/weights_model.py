"""The model that the tests of the weight channel send: a few tensors and a stand-in for its
logprobs.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch import Tensor

from broker.contract import wire
from broker.weights.probe import make_probe

SHAPES = {
    "embed": [1024, 1024],
    "layers.0.up": [1024, 2048],
    "layers.0.down": [2048, 1024],
    "layers.1.up": [1024, 2048],
    "norm": [1023],
}


def make_tensors(seed: int, shapes: dict[str, list[int]] | None = None) -> dict[str, Tensor]:
    """28 MiB of seeded fp32 tensors."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.rand(shape, generator=generator) for name, shape in (shapes or SHAPES).items()
    }


def content(tensors: dict[str, Tensor]) -> str:
    """A hash of every byte, independent of the channel's own digest."""
    hasher = hashlib.blake2b(digest_size=8)
    for name in sorted(tensors):
        hasher.update(name.encode() + tensors[name].contiguous().numpy().tobytes())
    return hasher.hexdigest()


def probe_logprobs(tensors: dict[str, Tensor]) -> np.ndarray:
    """Three numbers that depend on the weights, shape (3,)."""
    return torch.log_softmax(tensors["embed"].reshape(-1)[:3] + tensors["norm"][-3:], 0).numpy()


def probe_of(tensors: dict[str, Tensor]) -> wire.Probe:
    return make_probe([1, 2, 3, 4], probe_logprobs(tensors), tolerance=1e-5)
