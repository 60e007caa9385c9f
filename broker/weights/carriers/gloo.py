"""Broadcast between host memories, by torch's gloo."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from broker.weights.carriers.base import CollectiveCarrier

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store  # type: ignore[attr-defined]

    from broker.weights.protocol.session import TransferSettings


class GlooCarrier(CollectiveCarrier):
    """It needs no GPU, and listens on the interface's address."""

    def device(self) -> torch.device:
        import torch

        return torch.device("cpu")

    def connect(self, store: Store, rank: int, size: int, settings: TransferSettings) -> Any:
        from torch.distributed import ProcessGroupGloo

        from broker.weights.group import IN_FLIGHT

        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        # the default follows the host's name
        options._devices = [ProcessGroupGloo.create_device(hostname=settings.host)]
        options._timeout = timedelta(seconds=settings.connect_timeout_s)
        options._threads = IN_FLIGHT
        return ProcessGroupGloo(store, rank, size, options)


GLOO: Final = GlooCarrier(name="gloo", description="broadcast between host memories")
