"""Adjusts the number of a step's samples so that it divides into minibatches of equal size. Pure.

Micro-batches do not need this, because gradients are exact over a whole minibatch.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Literal, TypeVar

T = TypeVar("T")
Mode = Literal["copy", "delete", "auto", "random_sample"]


def adjust_samples(samples: Sequence[T], divisor: int, mode: Mode, seed: int) -> list[T]:
    """Return the samples, in their order, with their number adjusted to a multiple of ``divisor``.

    Args:
        divisor: at least 1; if it divides the number already, nothing changes.
        mode: ``copy`` appends samples drawn at random, each at most once more than any other;
            ``delete`` removes samples drawn at random, unless that would leave none; ``auto`` picks
            the mode that changes fewer, ``copy`` on a tie and below ``divisor``; ``random_sample``
            draws the next lower multiple (at least ``divisor``).
        seed: of the draw; the same seed and number of samples draw the same.
    """
    num_samples = len(samples)
    excess = num_samples % divisor
    if not excess:
        return list(samples)
    rng = random.Random(f"{seed}/{num_samples}/{divisor}")
    if mode == "random_sample":
        size = num_samples - excess or divisor
        return [samples[i] for i in sorted(rng.choices(range(num_samples), k=size))]
    missing = divisor - excess
    if mode == "copy" or (mode == "auto" and (num_samples < divisor or missing <= excess)):
        rounds, num_extra = divmod(missing, num_samples)
        return [
            *samples,
            *list(samples) * rounds,
            *(samples[i] for i in sorted(rng.sample(range(num_samples), num_extra))),
        ]
    if num_samples < divisor:
        return list(samples)
    removed_indices = set(rng.sample(range(num_samples), excess))
    return [sample for i, sample in enumerate(samples) if i not in removed_indices]
