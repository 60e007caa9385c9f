"""What a weight carrier is: the facts that others ask for, and how its two ends meet.

Carriers are asked by ``check``, ``doctor`` and the pure state machines, so these modules import no
torch; what moves the bytes is imported when two ends meet.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from broker.contract.wire import Carrier

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store  # type: ignore[attr-defined]

    from broker.weights.group import Group, WeightGroup
    from broker.weights.protocol.session import TransferSettings
    from broker.weights.rendezvous.board_request import BoardStore


class WeightCarrier(ABC):
    """A way for weights to travel from a learner to a server.

    Attributes:
        name: on the wire, and in ``train.weights_backend``.
        description: how the bytes travel, in a few words.
        is_automatic: with ``train.weights_backend`` auto the learner offers it.
        fallback: what the learner offers next to it, for servers that cannot use it.
        reads_memory: the server reads the learner's memory; there is no communicator.
        on_gpu: the bytes leave from and arrive in GPU memory.
        claims_gpu: each end needs a GPU that no other end of the transfer uses.
        is_independent: a transfer goes on without receivers that fail.
        serves_workers: an engine's own workers can receive by it.
        serves_stripes: each rank of a learner can send what it holds.
        host_carrier: what to use with weights in host memory; empty: this one.
        gpu_use: why it needs a GPU, in a few words.
        gpu_conflict: why two ends cannot use one GPU; empty: they can.
    """

    name: ClassVar[Carrier]
    description: ClassVar[str]
    is_automatic: ClassVar[bool] = True
    fallback: ClassVar[Carrier | None] = None
    reads_memory: ClassVar[bool] = False
    on_gpu: ClassVar[bool] = False
    claims_gpu: ClassVar[bool] = False
    is_independent: ClassVar[bool] = False
    serves_workers: ClassVar[bool] = True
    serves_stripes: ClassVar[bool] = False
    host_carrier: ClassVar[str] = ""
    gpu_use: ClassVar[str] = ""
    gpu_conflict: ClassVar[str] = ""

    def host_problem(self, place: str) -> str:
        """Return what is allowed with weights in host memory; empty: this carrier.

        Args:
            place: where the weights are, in words.
        """
        if not self.on_gpu:
            return ""
        return f"{self.host_carrier} with {place}: {self.name} {self.gpu_use}"


class ReadingCarrier(WeightCarrier):
    """A carrier whose servers read the learner's memory, see ``broker.weights.memory.shared``."""

    reads_memory = True


class SendingCarrier(WeightCarrier):
    """A carrier whose ends meet in a communicator, through the rendezvous."""

    @abstractmethod
    def open_sender(
        self, store: BoardStore, name: str, members: Sequence[str], settings: TransferSettings
    ) -> Group:
        """Open the sender's end of a communicator; it blocks.

        Args:
            name: of the communicator.
            members: servers that receive, by rank from 1; once for each rank that they bring.

        Raises:
            PeerLost: if they do not meet in time.
        """

    @abstractmethod
    def open_receiver(
        self, store: BoardStore, name: str, rank: int, size: int, settings: TransferSettings
    ) -> Group:
        """Open a receiver's end of a communicator; it blocks.

        Args:
            rank: of this receiver; the sender's is 0.
            size: ranks of the communicator.

        Raises:
            PeerLost: if they do not meet in time.
        """


class CollectiveCarrier(SendingCarrier):
    """A carrier whose ends are the ranks of one process group of torch.

    Attributes:
        polls: a wait with a timeout would abort the group, so that only polls are allowed.
    """

    serves_stripes = True
    polls: ClassVar[bool] = False

    @abstractmethod
    def device(self) -> torch.device:
        """Return where the buckets of a broadcast must be."""

    @abstractmethod
    def connect(
        self, store: Store, rank: int, size: int, *, host: str, connect_timeout_s: float
    ) -> Any:
        """Return torch's process group, once all ranks are connected.

        Args:
            host: address of this end's interface.

        Raises:
            RuntimeError: of torch, if they do not connect in time.
        """

    def join_group(
        self, store: BoardStore, name: str, rank: int, size: int, settings: TransferSettings
    ) -> WeightGroup:
        """Join a communicator; it blocks.

        Raises:
            PeerLost: if its ranks do not meet in time.
        """
        from broker.weights.group import WeightGroup

        return WeightGroup(
            store,
            name,
            rank,
            size,
            backend=self,
            host=settings.host,
            timeout_s=settings.timeout_s,
            connect_timeout_s=settings.connect_timeout_s,
        )

    def open_sender(
        self, store: BoardStore, name: str, members: Sequence[str], settings: TransferSettings
    ) -> Group:
        return self.join_group(store, name, 0, len(members) + 1, settings)

    def open_receiver(
        self, store: BoardStore, name: str, rank: int, size: int, settings: TransferSettings
    ) -> Group:
        return self.join_group(store, name, rank, size, settings)
