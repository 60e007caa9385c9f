"""The learner's end of the weight channel. Training waits only for one copy.

``offer`` copies the tensors into a staging buffer and returns. Digest, offer, joins, communicator
and broadcast run in the background. The event loop decides (broker.weights.sender.membership),
threads do what blocks. Once a server has received a version, versions are offered when their
packing begins, without a digest, and again with it once it is known: a bucket is then on the wire
while the next is packed. Before that the digest comes first, because a server may hold the bytes
already.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Mapping
from functools import partial
from typing import Final

import msgspec
import torch
from torch import Tensor

from broker.contract import wire
from broker.contract.streams import WEIGHTSYNC
from broker.errors import ConfigError, Fenced, TransferFailed
from broker.jetstream.bus import Bus
from broker.jetstream.core_messages import answer_requests
from broker.nats.nats_errors import Disconnected
from broker.nats.subscription import LinkSubscription
from broker.runtime.presence import Roster
from broker.weights.bucket_payload import ReferenceBytes
from broker.weights.carriers import CARRIERS, READ, reading_carrier
from broker.weights.group import Group, WaitMonitor
from broker.weights.memory.cuda import gpu_uuid, numbered
from broker.weights.memory.devices import SharedDevice
from broker.weights.memory.shared import segment_of
from broker.weights.memory.staging import StagingBuffers
from broker.weights.plan import LayoutPlan
from broker.weights.protocol.session import JOIN_TIMEOUT_S, PLAN_KEY, TransferSettings
from broker.weights.rendezvous.board_client import KeyPair, RendezvousAddress
from broker.weights.rendezvous.board_server import BoardServer
from broker.weights.sender.admission import Admission
from broker.weights.sender.membership import (
    Action,
    CancelTransfer,
    RefuseJoin,
    StartTransfer,
    TransferMembership,
)
from broker.weights.sender.offers import OfferStore
from broker.weights.sender.transfer import (
    SentVersion,
    SessionFailed,
    call_off,
    lead,
)
from broker.weights.sender.weight_responses import WeightResponses
from broker.weights.snapshots.publish import SnapshotPublisher
from broker.weights.stripes.lead import StripedWeights, lead_stripes
from broker.weights.stripes.stripe import STRIPES_KEY
from broker.weights.threads import ChannelTasks, in_thread

log = logging.getLogger(__name__)

TICK_S: Final = 0.05
IDLE_TICK_S: Final = 1.0


class WeightSender:
    """Offers versions and sends them to the servers that join.

    Args:
        bus: of the run, whose streams exist.
        plan: from ``staging.plan_of``, once per model.
        epoch: incarnation of this learner.
        roster: of the servers; None: each transfer waits ``gather_s`` for joins.
        device: of the weights; the GPU that carriers between GPUs send from.
        policy: the policy whose servers are awaited.
        delta_full_every: send only changes if all receivers hold the version sent last, but
            everything in at least one of this many transfers; None: always everything.
        adapter: what the plan's tensors are the factors of; None: they are the model.
        memory: the device of the staging buffers that servers can open.
        stripes: of a sharded learner, whose ranks all send; None: this process sends everything.
    """

    def __init__(
        self,
        bus: Bus,
        plan: LayoutPlan,
        *,
        epoch: int,
        settings: TransferSettings | None = None,
        roster: Roster | None = None,
        device: str | torch.device = "cpu",
        gather_s: float = 0.5,
        policy: str = wire.ACTOR,
        delta_full_every: int | None = None,
        adapter: wire.Adapter | None = None,
        memory: SharedDevice | None = None,
        stripes: StripedWeights | None = None,
    ) -> None:
        self.plan = plan
        self.epoch = epoch
        self._adapter = adapter
        self._has_sent = False  # to any server
        self.fenced = False  # a newer learner offers weights; this one has stopped
        # writes snapshots of offers; its owner closes it
        self.publisher: SnapshotPublisher | None = None
        self._bus = bus
        self._roster = roster
        self._policy = policy
        self._offers = OfferStore(bus, epoch)
        self.settings = settings or TransferSettings()
        self._gpu = numbered(device) if torch.device(device).type == "cuda" else None
        carriers = self.settings.carriers
        self._stripes = stripes
        self._num_orders = 0
        if stripes is not None:  # no process has whole versions in its memory
            carriers = tuple(carrier for carrier in carriers if CARRIERS[carrier].serves_stripes)
        self._segment = segment_of(plan, memory) if READ & set(carriers) else None
        # next to other carriers those between GPUs also send from host memory, where the buffers
        # take no room on the GPU
        only_gpus = bool(carriers) and all(CARRIERS[carrier].claims_gpu for carrier in carriers)
        staged_on = self._gpu if self._gpu is not None and only_gpus else torch.device("cpu")
        self._staging = StagingBuffers(plan, staged_on, self._segment) if stripes is None else None
        read_by = reading_carrier(on_gpu=self._segment is not None and self._segment.on_device)
        readable = {read_by} if self._segment is not None else set()
        self._carriers = [
            carrier for carrier in dict.fromkeys(read_by if name in READ else name for name in carriers)
            if carrier in readable or carrier not in READ
        ]  # fmt: skip
        self._bases = {
            carrier: ReferenceBytes(plan, delta_full_every, staged_on)
            for carrier in self._carriers if delta_full_every is not None and carrier not in READ
        }  # fmt: skip
        self._membership = TransferMembership(
            epoch,
            plan.digest,
            gather_s=gather_s,
            join_ttl_s=JOIN_TIMEOUT_S,
            carriers=self._carriers,
        )
        self._replies = WeightResponses(self.settings, read_by)
        self._communicators: dict[wire.Carrier, Group] = {}
        self._server: BoardServer | None = None
        self._watch = WaitMonitor()
        # version, probe, digest if it is known
        self._written: tuple[int, wire.Probe, str] | None = None
        self._written_lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._new_version = asyncio.Event()
        self._poke = asyncio.Event()
        self._tasks: ChannelTasks | None = None
        self._subscribed: LinkSubscription | None = None
        self._digests: dict[int, str] = {}  # of the newest version
        self._values = {"weights/version": -1.0}
        self._values |= dict.fromkeys(
            ("weights/failures", "weights/communicators", "weights/deltas"), 0.0
        )

    async def start(self) -> None:
        """Open the rendezvous and listen for joins.

        Raises:
            Fenced: if a newer epoch has offered weights.
            ConfigError: if the address or port is not available.
        """
        self._loop = asyncio.get_running_loop()
        await self._offers.begin()
        try:
            server = self._server = BoardServer(self.settings.host, self.settings.port)
        except OSError as error:
            allowed = f"unavailable at {self.settings.host} ({error.strerror}); give another, or 0"
            raise ConfigError("train.weights_port", self.settings.port, allowed) from None
        self._store = server.store(self.settings.connect_timeout_s)
        self._admission = Admission(server, self._roster)
        self._replies.port = server.port
        self._replies.key = server.key
        server.keep(PLAN_KEY, self.plan.text.encode())
        if self._stripes is not None:
            server.keep(
                STRIPES_KEY, msgspec.json.encode([plan.text for plan in self._stripes.plans])
            )
        self._subscribed = await answer_requests(
            self._bus, WEIGHTSYNC, str(self.epoch), self._on_join
        )
        self._tasks = ChannelTasks()
        self._tasks.spawn(self._publish_versions())
        self._tasks.spawn(self._decide())

    def offer(self, version: int, tensors: Mapping[str, Tensor], probe: wire.Probe) -> float:
        """Put a newer version on offer and return the seconds that its copy took. Call it from one
        thread at a time.

        Args:
            tensors: at least those of the plan, by name; may change after this returns.

        Raises:
            TransferFailed: if a planned tensor is missing or has another shape.
        """
        assert self._loop is not None, "start the sender first"
        start = time.monotonic()
        if self._staging is not None:
            self._staging.write(version, tensors, lambda: self._announce(version, probe))
        else:
            assert self._stripes is not None, "a sender stages whole versions or stripes"
            self._announce(version, probe, self._stripes.stage(version))
        seconds = time.monotonic() - start
        self._values["weights/copy_seconds"] = seconds
        return seconds

    def admit_rank(self, rank: int) -> tuple[RendezvousAddress, KeyPair]:
        """Return where another rank of this learner finds the rendezvous, and the keys that admit
        it.
        """
        assert self._server is not None, "start the sender first"
        keys = KeyPair.make()
        self._admission.admit_rank(f"learner-rank-{rank}", keys.public)
        return RendezvousAddress(self.settings.host, self._server.port, self._server.key), keys

    def _announce(self, version: int, probe: wire.Probe, digest: str = "") -> None:
        assert self._loop is not None, "start the sender first"
        with self._written_lock:
            self._written = (version, probe, digest)
        self._loop.call_soon_threadsafe(self._new_version.set)

    def metrics(self) -> dict[str, float]:
        """Return weights/{version, seconds, gbytes_per_s, sent_bytes, receivers, shared, failures,
        communicators, ...}.

        These are the newest version; for the last transfer its seconds, the model's bytes per
        second, the bytes per receiver, the receivers, and those by shared memory; for the last
        version the seconds of its copy and until its digest; the rest are totals.
        """
        return self._values | (self.publisher.metrics() if self.publisher is not None else {})

    @property
    def version(self) -> int:
        """Newest version on offer, -1 before the first."""
        return self._membership.version

    async def join(self) -> None:
        """Wait forever; raise the error that stopped the channel, after which no server would get a
        version.
        """
        assert self._tasks is not None, "start the sender first"
        await self._tasks.join()

    async def close(self) -> None:
        """Withdraw from the broker and cancel a running transfer; wait a second at most."""
        if self._subscribed is not None:
            await self._subscribed.close()
        self._watch.cancel("the learner is leaving")
        if self._tasks is not None:
            await self._tasks.cancel()
        self._replies.refuse_all("the learner is leaving", max(self._membership.version, 0))
        closing = [group.close() for group in self._communicators.values()]
        self._communicators.clear()
        for thread in closing:
            await in_thread(lambda thread=thread: thread.join(1.0), "weights-join")  # type: ignore[misc]
        if self._server is not None:
            await in_thread(self._server.close, "weights-close")

    # ------------------------------------------------------------------------------------------
    # offers

    async def _publish_versions(self) -> None:
        while True:
            await self._new_version.wait()
            self._new_version.clear()
            with self._written_lock:
                pending = self._written
            assert pending is not None
            version, probe, early_digest = pending
            start = time.monotonic()
            digesting = in_thread(partial(self._digest, version, early_digest), "weights-digest")
            offer = wire.WeightsOffer(
                epoch=self.epoch,
                version=version,
                digest="",
                plan=self.plan.digest,
                size_bytes=self.plan.size_bytes,
                carriers=self._carriers,
                probe=probe,
                adapter=self._adapter,
                segment=self._segment.address if self._segment is not None else "",
                devices=[gpu_uuid(self._gpu)]
                if self._gpu is not None
                and any(CARRIERS[carrier].claims_gpu for carrier in self._carriers)
                else [],
            )
            try:
                if early := self._has_sent and not early_digest:
                    self._perform(self._membership.offered(version))
                    await self._offers.publish(offer)
                digest = await digesting
                if digest is None:
                    continue  # it was overwritten, or could not be packed
                self._digests = {version: digest}
                self._values["weights/digest_seconds"] = time.monotonic() - start
                if not early:
                    # before it is stored, because joins may follow at once
                    self._perform(self._membership.offered(version))
                offer = msgspec.structs.replace(offer, digest=digest)
                await self._offers.publish(offer)
                if self.publisher is not None and self._staging is not None:
                    self.publisher.offered(self._staging, offer)
            except Fenced as error:
                log.error("weights: %s", error)
                self.fenced = True
                return
            except Disconnected:
                return  # closed
            self._values["weights/version"] = float(version)

    def _digest(self, version: int, digest: str) -> str | None:
        return digest or (self._staging.digest(version) if self._staging is not None else None)

    # -------------------------------------------------------------------------------------------
    # joins

    async def _on_join(self, message: wire.Message) -> wire.Message | None:
        if not isinstance(message, wire.WeightsJoin):
            return None
        if problem := await self._admission.admit(message):
            return self._replies.refusal(problem, max(self._membership.version, 0))
        reply = self._replies.expect(message.server)
        self._perform(self._membership.joined(message, time.monotonic()))
        self._poke.set()
        return await self._replies.wait(message.server, reply)

    # ---------------------------------------------------------------------------------------
    # transfers

    async def _decide(self) -> None:
        while True:
            try:
                async with asyncio.timeout(TICK_S if self._membership.busy else IDLE_TICK_S):
                    await self._poke.wait()
            except TimeoutError:
                pass
            self._poke.clear()
            self._admission.tick()
            self._perform(self._membership.tick(time.monotonic(), *self._present()))

    def _present(self) -> tuple[set[str] | None, set[str] | None]:
        """Return (servers without the newest version, all servers), None without a roster."""
        if self._roster is None:
            return None, None
        servers = [
            presence
            for presence in self._roster.alive("rollout")
            if presence.policy == self._policy
        ]
        newest = (self.epoch, self._membership.version)
        staying = [server for server in servers if server.state != "draining"]
        expected = {
            server.id for server in staying if (server.epoch, server.policy_version) < newest
        }
        return expected, {server.id for server in servers}

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, RefuseJoin):
                self._replies.refuse(action.server, action.reason, max(self._membership.version, 0))
            elif isinstance(action, CancelTransfer):
                self._watch.cancel(action.reason)
            else:
                self._begin(action)

    def _begin(self, start: StartTransfer) -> None:
        if start.fresh and not start.alone and start.carrier in self._communicators:
            self._communicators.pop(start.carrier).close()
        self._watch = WaitMonitor()
        self._replies.begin(start)
        assert self._tasks is not None, "start the sender first"
        self._tasks.spawn(self._transfer(start))

    async def _transfer(self, start: StartTransfer) -> None:
        failed: set[str] | None = None
        ours = False
        communicator = None
        watch = self._watch
        if start.num_sent and not start.alone:
            communicator = self._communicators.pop(start.carrier, None)
        try:
            report = await in_thread(lambda: self._send(start, communicator, watch), "weights-send")
            self._has_sent = True
            if start.num_sent and not start.alone and report.communicator is not None:
                self._communicators[start.carrier] = report.communicator
            elif report.communicator is not None:
                report.communicator.close()  # it joins the others for the next version
            self._values["weights/seconds"] = report.seconds
            self._values["weights/gbytes_per_s"] = self.plan.size_bytes / report.seconds / 1e9
            self._values["weights/sent_bytes"] = float(report.size_bytes)
            self._values["weights/deltas"] += not report.whole
            readers = float(len(set(start.members[start.num_sent :])))
            self._values |= {
                "weights/receivers": float(len(start.servers)),
                "weights/shared": readers,
            }
            self._values["weights/communicators"] += start.fresh
        except TransferFailed as error:
            failed, ours = (
                (set(error.servers), error.ours)
                if isinstance(error, SessionFailed)
                else (set(), True)
            )
            self._values["weights/failures"] += 1
            log.warning(
                "weights: sending version %d to %s failed: %s",
                start.version,
                ", ".join(start.servers),
                error,
            )
        self._membership.ended(time.monotonic(), failed, ours=ours)
        self._poke.set()

    def _send(
        self, start: StartTransfer, communicator: Group | None, watch: WaitMonitor
    ) -> SentVersion:
        if self._gpu is not None:
            torch.cuda.set_device(self._gpu)
        try:
            if self._stripes is not None:
                self._num_orders += 1
                digest = self._digests.get(start.version, "")
                order = self._num_orders - 1
                return lead_stripes(
                    self._store,
                    start,
                    self._stripes,
                    number=order,
                    digest=digest,
                    settings=self.settings,
                    watch=watch,
                )
            assert self._staging is not None, "a sender stages whole versions or stripes"
            with self._staging.sending(start.version) as staged:
                # which tracks what the others hold
                base = (
                    None
                    if start.alone and start.carrier in self._communicators
                    else self._bases.get(start.carrier)
                )
                return lead(
                    self._store,
                    start,
                    staged,
                    communicator=communicator,
                    settings=self.settings,
                    watch=watch,
                    base=base,
                )
        except SessionFailed:
            raise
        except TransferFailed as error:  # overwritten before it started, while the members wait
            raise call_off(self._store, start, communicator, str(error)) from None
