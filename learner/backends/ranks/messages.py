"""What rank 0 tells the other ranks, and what they answer. Frames of msgpack over a socket that only these processes hold."""

from __future__ import annotations

from typing import Any, Final

import msgspec
import numpy as np

from learner.algorithm.samples import Array, TrainSample

_DTYPES: Final = {
    "token_ids": "<i4",
    "loss_mask": "u1",
    "rollout_logprobs": "<f4",
    "versions": "<i4",
    "advantages": "<f4",
    "proximal_logprobs": "<f4",
    "values": "<f4",
    "returns": "<f4",
}


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """A ``TrainSample``; columns as little-endian bytes, None where it has none."""

    columns: tuple[bytes | None, ...]  # in the order of _DTYPES
    group: int
    reward: float
    temperature: float


class Build(msgspec.Struct, frozen=True, tag=True):
    """The first: make the backend and join."""

    backend: str  # "module:attribute"
    rank: int
    size: int
    store: str  # file of the rendezvous
    settings: dict[str, Any]  # sections and other arguments of the backend


class Run(msgspec.Struct, frozen=True, tag=True):
    """Forward passes, and backward passes where ``train``. Answered by ``Sums``."""

    slices: list[list[Sample]]
    train: list[bool]
    kl_coef: float
    version: int
    critic: bool = False  # of the critic's passes, all trained


class Score(msgspec.Struct, frozen=True, tag=True):
    """Logprobs and divergence before the step. Answered by ``Columns``."""

    slices: list[list[Sample]]


class Step(msgspec.Struct, frozen=True, tag=True):
    """Reduce the gradient, divide, clip, update."""

    denominator: float  # of the critic, its trained tokens
    at: int
    critic: bool = False  # of the critic, which may be another number of times


class Discard(msgspec.Struct, frozen=True, tag=True):
    """Forget the gradient."""


class Sync(msgspec.Struct, frozen=True, tag=True):
    """Take weights and optimizer from rank 0."""

    updates: int
    critic: bool = False  # the critic's


class Call(msgspec.Struct, frozen=True, tag=True):
    """Take part in an operation of the backend that needs all ranks."""

    name: str
    numbers: list[int] = []


class Sums(msgspec.Struct, frozen=True, tag=True):
    """Of each slice."""

    slices: list[dict[str, float]]


class Columns(msgspec.Struct, frozen=True, tag=True):
    """Of each slice: float32 columns over its trained tokens, None what was not asked for."""

    slices: list[list[bytes | None]]


Command = Build | Run | Score | Step | Discard | Sync | Call
Reply = Sums | Columns


class Filler(TrainSample):
    """One token to read and none to train: a pass that adds nothing, for ranks that have none of their own when others do."""

    @property
    def num_inputs(self) -> int:
        """The model must be given something."""
        return 1


def filler() -> Filler:
    """A slice of this alone has a gradient of zero."""
    zeros = np.zeros(1, np.float32)
    return Filler(zeros.astype(np.int32), zeros.astype(np.uint8), zeros, zeros.astype(np.int32), zeros, group=0, reward=0.0)


def pack(sample: TrainSample) -> Sample:
    """To send it."""
    columns = (getattr(sample, name) for name in _DTYPES)
    data = tuple(
        None if c is None else np.ascontiguousarray(c, dtype).tobytes() for c, dtype in zip(columns, _DTYPES.values(), strict=True)
    )
    return Sample(data, sample.group, float(sample.reward), float(sample.temperature))


def unpack(sample: Sample) -> TrainSample:
    """As it was."""
    found: dict[str, Array | None] = {
        name: None if data is None else np.frombuffer(data, dtype)
        for (name, dtype), data in zip(_DTYPES.items(), sample.columns, strict=True)
    }
    return TrainSample(**found, group=sample.group, reward=sample.reward, temperature=sample.temperature)  # type: ignore[arg-type]


def deal(costs: list[int], num_ranks: int) -> list[list[int]]:
    """Which slices each rank takes, ascending: the largest first, each to whoever has least so far, the lowest rank among equals."""
    dealt: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        rank = loads.index(min(loads))
        dealt[rank].append(index)
        loads[rank] += costs[index]
    return [sorted(indices) for indices in dealt]
