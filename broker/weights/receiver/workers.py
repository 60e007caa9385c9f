"""Transfers that an engine's own worker processes receive: each is a rank of the communicator and
loads its part.

    server                                                   each worker
    join, with the number of workers
    WorkerTransfer as text, by the engine's own calls  --->  begin: a thread meets the learner and the other members
    waits for the learner's go, then pauses the engine       first buckets arrive while the engine still generates
    "load"                                             --->  load: hands tensors to the engine as they are complete
                                                             digest of all that this worker received is the learner's?
    resumes; probe                                     <---

No copy goes through the server's process, and a worker holds a few buckets at a time, not a second
model. The price: the engine pauses for the rest of the transfer, and a transfer that fails half-way
leaves it without a version until the next one has succeeded.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

import msgspec
import torch

from broker.contract import wire
from broker.errors import TransferFailed
from broker.system.connections import address_towards
from broker.weights import plan as plans
from broker.weights.carriers import CARRIERS, READ
from broker.weights.group import Group, WaitMonitor, first_line
from broker.weights.memory.cuda import CudaDevice
from broker.weights.memory.shared import SegmentReader, is_here
from broker.weights.plan import LayoutPlan
from broker.weights.protocol.session import TransferSettings
from broker.weights.receiver.bucket_stream import BucketStream, NamedTensors
from broker.weights.receiver.follow import follow
from broker.weights.rendezvous.board_client import BoardClient, KeyPair, RendezvousAddress


class WorkerTransfer(msgspec.Struct, frozen=True):
    """What workers need to take part in a transfer."""

    session: wire.WeightsSession  # rank is that of the first worker
    digest: str  # of the offer; empty: the learner sends it at the end
    plan: str  # text of the layout plan
    segment: str  # of the offer: where the learner's memory is, for those that read it
    public: str  # the server's CURVE key pair, Z85
    secret: str
    connect_timeout_s: float

    def text(self) -> str:
        """Return it as JSON, for the engine's calls."""
        return msgspec.json.encode(self).decode()

    def __repr__(self) -> str:
        return f"WorkerTransfer({self.session.session})"  # not the key

    __str__ = __repr__


@dataclass(frozen=True)
class EngineWorkers:
    """An engine whose workers receive weights themselves.

    Attributes:
        carriers: by which they can, with the number of workers.
        devices: UUIDs of their GPUs; some carriers allow no two ends on one.
        receive: has the workers receive and load a version once the awaitable has returned, and
            checks the offer's probe; returns the digest of what they received. Raises
            TransferFailed if one failed; what the engine holds is then unknown.
    """

    carriers: Mapping[wire.Carrier, int]
    receive: Callable[
        [WorkerTransfer, wire.WeightsOffer, Callable[[], Awaitable[None]]], Awaitable[str]
    ]
    devices: frozenset[str] = frozenset()

    def takes(self, offer: wire.WeightsOffer) -> dict[wire.Carrier, int]:
        """Return how they can receive an offered version; adapters are merged by the server's
        process.
        """
        if offer.adapter is not None:
            return {}
        impossible = set[wire.Carrier]() if is_here(offer.segment) else set(READ)
        if self.devices & set(offer.devices):
            impossible |= {name for name, carrier in CARRIERS.items() if carrier.claims_gpu}
        return {
            carrier: ranks for carrier, ranks in self.carriers.items() if carrier not in impossible
        }


class WorkerReceiver:
    """One worker's end of the transfers of its server.

    Args:
        worker: number among the server's workers, from 0.
        device: where buckets arrive by carriers between GPUs; else they arrive in host memory.
    """

    def __init__(self, worker: int, device: torch.device) -> None:
        self._worker = worker
        self._device = device
        self._store: BoardClient | None = None
        self._group: Group | None = None
        self._running: _Running | None = None

    def begin(self, text: str) -> None:
        """Start to receive in a thread; cancels a transfer that was begun before."""
        self.cancel("another transfer begins")
        transfer = msgspec.json.decode(text, type=WorkerTransfer)
        session = msgspec.structs.replace(
            transfer.session, rank=transfer.session.rank + self._worker
        )
        device = self._device if CARRIERS[session.carrier].on_gpu else torch.device("cpu")
        running = self._running = _Running(
            BucketStream(plans.from_text(transfer.plan), device), session.timeout_s
        )

        def run() -> None:
            try:
                running.digest = self._receive(transfer, session, running, device)
            except TransferFailed as error:
                running.problem = str(error)
            except RuntimeError as error:  # torch's
                running.problem = first_line(error)
            finally:
                running.stream.end()

        running.thread = threading.Thread(target=run, name="weights-receive", daemon=True)
        running.thread.start()

    def _receive(
        self,
        transfer: WorkerTransfer,
        session: wire.WeightsSession,
        running: _Running,
        device: torch.device,
    ) -> str:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        address = RendezvousAddress(session.host, session.port, session.key)
        if self._store is None or self._store.lost or self._store.address != address:
            self.close()
            keys = KeyPair(transfer.public, transfer.secret.encode())
            self._store = BoardClient(address, keys, transfer.connect_timeout_s)
        self._store.timeout_s = max(transfer.connect_timeout_s, session.timeout_s)
        try:
            host = address_towards(session.host, session.port)
        except OSError as error:
            raise TransferFailed(
                f"no route to the learner's {session.host}: {error.strerror}"
            ) from None
        settings = TransferSettings(
            host=host, timeout_s=session.timeout_s, connect_timeout_s=transfer.connect_timeout_s
        )
        group = self._group
        self._group = None
        window = (
            _window(transfer.segment, running.stream.plan, device)
            if session.carrier in READ
            else None
        )
        try:
            received = follow(
                self._store,
                session,
                transfer.digest,
                arrival=running.stream,
                communicator=group,
                settings=settings,
                watch=running.watch,
                window=window,
            )
        except TransferFailed:
            self._store.close()
            raise
        finally:
            if window is not None:
                window.close()
        self._group = received.communicator
        return received.digest

    def load(self, load: Callable[[NamedTensors], None]) -> str:
        """Load the tensors of the transfer that was begun as they come; return the digest of all
        bytes.

        Raises:
            TransferFailed: if it failed; what was loaded so far is of the new version.
        """
        running = self._running
        if running is None or running.thread is None:
            raise TransferFailed("no transfer was begun")
        try:
            for tensors in running.stream.tensors(running.watch, running.timeout_s):
                load(tensors)
            running.thread.join(running.timeout_s)
        except BaseException as error:
            running.watch.cancel(f"loading failed: {first_line(error)}")
            raise
        finally:
            self._running = None
        if running.problem or not running.digest:
            raise TransferFailed(running.problem or "the transfer did not end")
        return running.digest

    def cancel(self, reason: str) -> None:
        """Cancel the transfer that was begun, if any, and wait for its thread."""
        running = self._running
        self._running = None
        if running is not None and running.thread is not None:
            running.watch.cancel(reason)
            running.thread.join(1.0)

    def close(self) -> None:
        """Leave the communicator and the rendezvous."""
        if self._group is not None:
            self._group.close()
            self._group = None
        if self._store is not None:
            self._store.close()
            self._store = None


def _window(address: str, plan: LayoutPlan, device: torch.device) -> SegmentReader:
    try:
        return SegmentReader(address, plan, CudaDevice(device) if device.type == "cuda" else None)
    except (OSError, ValueError) as error:
        raise TransferFailed(f"the learner's memory cannot be read: {first_line(error)}") from None


@dataclass
class _Running:
    """A transfer under way."""

    stream: BucketStream
    timeout_s: float
    thread: threading.Thread | None = None
    digest: str = ""
    problem: str = ""

    def __post_init__(self) -> None:
        self.watch = WaitMonitor()
