"""What a weight carrier is: the facts that others ask for, and how its two ends meet.

Carriers are asked by ``check``, ``doctor`` and the pure state machines, so these modules import no
torch; what moves the bytes is imported when two ends meet.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from broker.contract.wire import Carrier
from broker.errors import TransferFailed

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store  # type: ignore[attr-defined]

    from broker.weights.group import Group
    from broker.weights.protocol.session import TransferSettings
    from broker.weights.rendezvous.board_request import BoardStore


@dataclass(frozen=True, kw_only=True)
class WeightCarrier:
    """A way for weights to travel from a learner to a server.

    Attributes:
        name: on the wire, and in ``train.weights_backend``.
        description: how the bytes travel, in a few words.
        is_automatic: with ``train.weights_backend`` auto the learner offers it.
        fallback: what the learner offers next to it, for servers that cannot use it.
        reads_memory: the server reads the learner's memory, see ``broker.weights.memory.shared``;
            there is no communicator.
        on_gpu: the bytes leave from and arrive in GPU memory.
        claims_gpu: each end needs a GPU that no other end of the transfer uses.
        gpu_use: what it needs a GPU for, in a few words.
        gpu_conflict: why two ends cannot use one GPU.
        host_carrier: what to use with weights in host memory, if not this one.
        is_independent: a transfer goes on without receivers that fail.
        serves_workers: an engine's own workers can receive by it.
        serves_stripes: each rank of a learner can send what it holds.
    """

    name: Carrier
    description: str
    is_automatic: bool = True
    fallback: Carrier | None = None
    reads_memory: bool = False
    on_gpu: bool = False
    claims_gpu: bool = False
    gpu_use: str = ""
    gpu_conflict: str = ""
    host_carrier: Carrier | None = None
    is_independent: bool = False
    serves_workers: bool = True
    serves_stripes: bool = False

    def host_problem(self, place: str) -> str:
        """Return what is allowed with weights in host memory; empty: this carrier.

        Args:
            place: where the weights are, in words.
        """
        return f"{self.host_carrier} with {place}: {self.name} {self.gpu_use}" * self.on_gpu

    def open_group(
        self,
        store: BoardStore,
        name: str,
        *,
        rank: int,
        size: int,
        settings: TransferSettings,
        members: Sequence[str] = (),
    ) -> Group:
        """Return this end of a communicator, once the two ends have met; it blocks.

        Args:
            store: of the rendezvous.
            rank: of this end; the sender's is 0.
            size: ranks of the communicator.
            members: at the sender, the servers by rank from 1, once for each rank.

        Raises:
            PeerLost: if they do not meet in time.
            TransferFailed: if the carrier has no communicator.
        """
        raise TransferFailed(f"carrier {self.name} has no communicator")


@dataclass(frozen=True, kw_only=True)
class CollectiveCarrier(WeightCarrier, ABC):
    """A carrier whose ends are the ranks of one process group of torch.

    Attributes:
        polls: a wait with a timeout would abort the group, so that only polls are allowed.
    """

    serves_stripes: bool = True
    polls: bool = False

    @abstractmethod
    def device(self) -> torch.device:
        """Return where the buckets of a broadcast must be."""

    @abstractmethod
    def connect(self, store: Store, rank: int, size: int, settings: TransferSettings) -> Any:
        """Return torch's process group, once all ranks are connected.

        Raises:
            RuntimeError: of torch, if they do not connect in time.
        """

    def open_group(
        self,
        store: BoardStore,
        name: str,
        *,
        rank: int,
        size: int,
        settings: TransferSettings,
        members: Sequence[str] = (),
    ) -> Group:
        from broker.weights.group import WeightGroup

        return WeightGroup(
            store,
            name,
            rank,
            size,
            carrier=self,
            settings=settings,
        )
