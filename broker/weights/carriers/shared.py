"""Servers on the learner's host read its memory."""

from __future__ import annotations

from typing import Final

from broker.weights.carriers.base import WeightCarrier

SHARED: Final = WeightCarrier(
    name="shared",
    description="the server reads the learner's host memory",
    fallback="gloo",
    reads_memory=True,
)
