"""Servers on the learner's host read its memory."""

from __future__ import annotations

from broker.weights.carriers.base import ReadingCarrier


class SharedMemoryCarrier(ReadingCarrier):
    """The server needs the learner's host and user."""

    name = "shared"
    description = "the server reads the learner's host memory"
    fallback = "gloo"
