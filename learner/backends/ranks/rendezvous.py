"""Gives each rank a device and joins ranks in one process group."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

from broker.errors import ConfigError, RlearnerError
from broker.system.connections import interface_of
from broker.weights.carriers.nccl import nccl_environment
from broker.weights.group import first_line
from learner.backends.section_checks import check_rank_device
from learner.config import TrainSection

# Of one collective, for a rank that hangs; one that exits is noticed at once.
_TIMEOUT: Final = timedelta(minutes=10)
# Prefixes of the variables that decide how ranks connect.
_REPORTED_PREFIXES: Final = ("NCCL_", "GLOO_", "TORCH_NCCL_", "CUDA_VISIBLE_DEVICES")


class GroupFailedError(RlearnerError):
    """The ranks could not connect to each other."""


@dataclass(frozen=True)
class Meeting:
    """Where the ranks of one group find each other.

    Attributes:
        store: a store of torch, the same for all ranks.
        address: of the interface on which this rank meets those of other hosts; empty if all are on
            this host.
    """

    store: Any
    address: str = ""

    @classmethod
    def in_file(cls, path: str, size: int) -> Meeting:
        """Meet in a file of this host."""
        return cls(dist.FileStore(path, size))  # type: ignore[attr-defined]


def settings_on_rank(train: TrainSection, local_rank: int, num_here: int) -> TrainSection:
    """Return the settings of one rank, each with its own GPU.

    Args:
        local_rank: number of the rank on its host.
        num_here: ranks on that host.

    Raises:
        ConfigError: if ranks cannot share the device, or there are fewer GPUs than ranks.
    """
    if (
        train.ranks == 1
        or train.device == "cpu"
        or (train.device == "auto" and not torch.cuda.is_available())
    ):
        return train
    check_rank_device(train)
    if num_here > (num_gpus := torch.cuda.device_count()):
        if num_gpus == 1 and num_here < train.ranks:
            # Slurm may let each task see its own GPU only.
            return train.model_copy(update={"device": "cuda:0"})
        if num_here == train.ranks:
            machine = "this machine"
        else:
            machine = f"{socket.gethostname()}, which has {num_here} of them,"
        raise ConfigError("train.ranks", train.ranks, f"{machine} has {num_gpus} GPUs")
    return train.model_copy(update={"device": f"cuda:{local_rank}"})


def join_group(meeting: Meeting, rank: int, size: int, device: torch.device) -> None:
    """Join the other ranks, on the loopback interface if all are on this host.

    Raises:
        GroupFailedError: if they cannot connect; says by which interface and with which versions
            and variables.
    """
    backend = _select_backend(device)
    address = meeting.address
    interface = interface_of(address) if address else _loopback_interface()
    # Variables that a user has set take precedence.
    for name, value in group_environment(interface, address).items():
        os.environ.setdefault(name, value)
    try:
        dist.init_process_group(
            backend, store=meeting.store, rank=rank, world_size=size, timeout=_TIMEOUT
        )
        # NCCL connects at the first collective, and so reports its errors here.
        dist.all_reduce(torch.zeros(1, device=device))
    except RuntimeError as error:
        raise GroupFailedError(
            describe_failure(
                error,
                backend,
                rank,
                size=size,
                interface=interface,
                address=address,
                environ=os.environ,
            )
        ) from None


def group_environment(interface: str, address: str) -> dict[str, str]:
    """Return the variables that bind gloo and NCCL to an interface."""
    if not interface:
        return {}
    variables = {"GLOO_SOCKET_IFNAME": interface}
    if address:
        variables |= {
            name: value
            for name, value in nccl_environment(address).items()
            if name.startswith("NCCL_")
        }
    return variables


def describe_failure(
    error: Exception,
    backend: str,
    rank: int,
    size: int,
    interface: str,
    address: str,
    environ: Mapping[str, str],
) -> str:
    """Return one line about a group that did not form: interface, versions and variables."""
    versions = [f"torch {torch.__version__}"]
    if backend == "nccl":
        nccl: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        versions += [f"NCCL {'.'.join(map(str, nccl))}", f"CUDA {torch.version.cuda}"]
    variables = [
        f"{name}={value}"
        for name, value in sorted(environ.items())
        if name.startswith(_REPORTED_PREFIXES)
    ]
    route = f"interface {interface or 'unknown'}"
    if address:
        route = f"{route} ({address})"
    return (
        f"{backend} cannot connect rank {rank} with the other {size - 1}: {first_line(error)}; "
        f"{route}, {', '.join(versions)}, {' '.join(variables) or 'no variables of NCCL or gloo'}"
    )


def join_single_group(device: torch.device) -> None:
    """Make a group of one, for libraries that need a group."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(_select_backend(device), store=store, rank=0, world_size=1)


def _loopback_interface() -> str:
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "")


def _select_backend(device: torch.device) -> str:
    """Return the backend of torch.distributed for a device."""
    if device.type != "cuda":
        return "gloo"
    torch.cuda.set_device(device)
    return "nccl"
