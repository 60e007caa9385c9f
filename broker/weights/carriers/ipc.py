"""Servers on the learner's GPU, or on a peer of it, read its memory."""

from __future__ import annotations

from typing import Final

from broker.weights.carriers.base import WeightCarrier

IPC: Final = WeightCarrier(
    name="ipc",
    description="the server reads the learner's GPU memory",
    is_automatic=False,  # it has run with one kind of GPU only
    fallback="gloo",
    reads_memory=True,
    on_gpu=True,
    gpu_use="is read in a GPU's memory",
    host_carrier="shared",
)
