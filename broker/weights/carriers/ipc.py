"""Servers on the learner's GPU, or on a peer of it, read its memory."""

from __future__ import annotations

from broker.weights.carriers.base import ReadingCarrier


class IpcCarrier(ReadingCarrier):
    """The server needs the learner's GPU, or a peer of it, and the learner's user."""

    name = "ipc"
    description = "the server reads the learner's GPU memory"
    is_automatic = False  # it has run with one kind of GPU only
    fallback = "gloo"
    on_gpu = True
    host_carrier = "shared"
    gpu_use = "is read in a GPU's memory"
