"""Broadcast between GPUs, by NCCL."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from broker.system.connections import interface_of
from broker.weights.carriers.base import CollectiveCarrier

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store  # type: ignore[attr-defined]

    from broker.weights.protocol.session import TransferSettings


class NcclCarrier(CollectiveCarrier):
    """It is told the interface's name, in the environment."""

    def device(self) -> torch.device:
        import torch

        return torch.device("cuda", torch.cuda.current_device())

    def connect(self, store: Store, rank: int, size: int, settings: TransferSettings) -> Any:
        from torch.distributed import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=settings.connect_timeout_s)
        with _set_environment(nccl_environment(settings.host)):
            group = ProcessGroupNCCL(store, rank, size, options)
            group.eager_connect_single_device(self.device())
        return group


def nccl_environment(host: str) -> dict[str, str]:
    """Return NCCL's variables for an interface's address; NCCL reads them when it first connects in
    a process.
    """
    # its watchdog would end this process when a peer hangs
    variables = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
    if interface := interface_of(host):
        variables |= {
            "NCCL_SOCKET_IFNAME": f"={interface}",
            "NCCL_SOCKET_FAMILY": "AF_INET6" if ":" in host else "AF_INET",
        }
    return variables


@contextmanager
def _set_environment(values: Mapping[str, str]) -> Iterator[None]:
    previous = {key: os.environ.get(key) for key in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for key, value in previous.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value


NCCL: Final = NcclCarrier(
    name="nccl",
    description="broadcast between GPUs",
    on_gpu=True,
    claims_gpu=True,
    gpu_use="sends between GPUs",
    gpu_conflict="NCCL takes no two members on one GPU",
    host_carrier="gloo",
    polls=True,
)
