"""Gives each rank a device and joins ranks in one process group."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist

from broker.errors import ConfigError
from learner.config import TrainSection

_TIMEOUT: Final = timedelta(minutes=10)  # of one collective, for a rank that hangs; one that exits is noticed at once


def settings_on_rank(train: TrainSection, rank: int) -> TrainSection:
    """Return the settings of one rank, each with its own GPU.

    Raises:
        ConfigError: if ranks cannot share the device, or there are fewer GPUs than ranks.
    """
    if train.ranks == 1 or train.device == "cpu" or (train.device == "auto" and not torch.cuda.is_available()):
        return train
    if train.device not in ("auto", "cuda"):
        allowed = f"auto, cpu or cuda with train.ranks {train.ranks}: each rank takes a GPU of its own"
        raise ConfigError("train.device", train.device, allowed)
    if train.ranks > torch.cuda.device_count():
        raise ConfigError("train.ranks", train.ranks, f"this machine has {torch.cuda.device_count()} GPUs")
    return train.model_copy(update={"device": f"cuda:{rank}"})


def join_group(store: str, rank: int, size: int, device: torch.device) -> None:
    """Join the other ranks on the loopback interface."""
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    if loopback is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    meeting = dist.FileStore(store, size)  # type: ignore[attr-defined]
    dist.init_process_group(_take(device), store=meeting, rank=rank, world_size=size, timeout=_TIMEOUT)


def join_single_group(device: torch.device) -> None:
    """Make a group of one, for libraries that need a group."""
    dist.init_process_group(_take(device), store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]


def _take(device: torch.device) -> str:
    """Return the backend of torch.distributed for a device."""
    if device.type != "cuda":
        return "gloo"
    torch.cuda.set_device(device)
    return "nccl"
