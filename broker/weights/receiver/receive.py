"""A rollout server's end of the weight channel: follows the offers and loads the newest version
into the engine.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from broker.contract import wire
from broker.contract.streams import WEIGHTS
from broker.errors import OfferRefused, RequestFailed, TransferFailed
from broker.jetstream.bus import Bus
from broker.runtime.spans import SpanRecorder
from broker.system.connections import address_towards
from broker.system.reminders import Reminders
from broker.weights import fp8
from broker.weights.adapter import First
from broker.weights.carriers import CARRIERS, READ, reading_carrier
from broker.weights.carriers.selection import MAX_LOST, accepted_carriers
from broker.weights.group import Group, WaitMonitor, first_line
from broker.weights.memory.cuda import device_of, gpu_uuid
from broker.weights.memory.devices import SharedDevice
from broker.weights.memory.shared import LocalLearner, SegmentReader
from broker.weights.memory.staging import plan_of
from broker.weights.protocol.session import TransferSettings
from broker.weights.protocol.transfer import CHANGES, ReceivedVersion
from broker.weights.receiver.acceptance import (
    OLD,
    AdoptVersion,
    CheckSnapshot,
    JoinTransfer,
    OfferAcceptance,
    Snapshots,
    WaitForOffer,
)
from broker.weights.receiver.buffers import IncomingVersion
from broker.weights.receiver.follow import follow, wait_for_go
from broker.weights.receiver.weight_loader import Load, WeightLoader
from broker.weights.receiver.weight_requests import WeightRequests
from broker.weights.receiver.workers import EngineWorkers, WorkerTransfer
from broker.weights.snapshots.snapshot import SnapshotManifest
from broker.weights.snapshots.snapshot_poller import SnapshotPoller
from broker.weights.snapshots.snapshot_source import SnapshotSource
from broker.weights.store_messages import StoreMessages
from broker.weights.threads import ChannelTasks, in_thread, patiently

log = logging.getLogger(__name__)


class WeightReceiver:
    """Keeps one engine's weights at the newest offer.

    Args:
        server_id: as in presence.
        tensors: the engine's weights by name, as they travel; meta tensors if the bytes cannot be
            read, so that the first version needs a transfer.
        load: loads the given tensors into the engine at a safe point and checks the offer's probe
            (``probe.check_probe``); raises TransferFailed if it does not match. The tensors are
            valid until it returns. An empty mapping means that the engine holds the bytes and only
            the version is new. The version counts as served when ``load`` returns.
        bucket_mib: the sender's.
        dtype: of floating-point tensors on the way, torch's name or ``fp8``, as at the sender;
            None: their own.
        device: the GPU for buckets that arrive on one; None: where the tensors are. Others
            arrive on the CPU.
        kept: the tensors given to ``load`` are used until it returns the next time; else only until
            it returns.
        first: finds the base of adapters, see ``adapter.AdapterBase``.
        snapshots: where to look while the learner cannot be reached.
        only_snapshots: never ask the learner.
        memory: opens a learner's device memory; None: CUDA's if versions can arrive on a GPU.
        workers: the engine's, if they receive whole models themselves.
        pace: held during each transfer and load; no other begins while another holds it.
        spans: of the process, for the timeline.
    """

    def __init__(
        self,
        bus: Bus,
        server_id: str,
        tensors: Mapping[str, Tensor],
        load: Load,
        *,
        bucket_mib: float = 32.0,
        dtype: str | None = None,
        device: str | torch.device | None = None,
        settings: TransferSettings | None = None,
        kept: bool = False,
        first: First | None = None,
        snapshots: SnapshotSource | None = None,
        only_snapshots: bool = False,
        memory: SharedDevice | None = None,
        workers: EngineWorkers | None = None,
        pace: asyncio.Lock | None = None,
        spans: SpanRecorder | None = None,
    ) -> None:
        self._spans = spans or SpanRecorder()
        self._workers = workers if dtype != fp8.NAME else None  # they load what arrives as it is
        self.plan = plan_of(tensors, bucket_mib, dtype=dtype)
        self.refused = ""  # why the newest offer is not for this server, for example another model
        self._difference = ""  # of the last refused offer, which was logged
        self.last_error = ""  # of the last attempt, empty after a success
        self._bus = bus
        self._settings = settings or TransferSettings()
        self._questions = WeightRequests(bus, server_id, self._settings.connect_timeout_s)
        self._poller = SnapshotPoller(snapshots, bus.run) if snapshots is not None else None
        looking: Snapshots = (
            "none" if snapshots is None else "only" if only_snapshots else "fallback"
        )
        self._state = OfferAcceptance(self.plan.digest, None, looking)
        quantised = dtype == fp8.NAME
        self._loader = WeightLoader(
            self._state,
            self.plan,
            tensors,
            load,
            bucket_mib=bucket_mib,
            device=device,
            kept=kept,
            first=first,
            quantised=quantised,
        )
        self._neighbour = LocalLearner(memory or device_of(self._loader.device))
        self._lost: Counter[wire.Carrier] = (
            Counter()
        )  # consecutive failed transfers from the learner of ``_lost_epoch``
        self._lost_epoch = 0
        self._communicator: Group | None = None
        self._watch = WaitMonitor()
        self._receiving_epoch = 0
        self._changed = asyncio.Event()
        self._served = asyncio.Condition()
        self._tasks: ChannelTasks | None = None
        self._pace = pace or asyncio.Lock()
        self._waiting = Reminders()  # for an absent learner
        self._repeating = Reminders()  # a load in vain
        self._values = {"weights/version": -1.0, "weights/failures": 0.0}

    @property
    def served(self) -> tuple[int, int]:
        """(epoch, version) that is loaded and checked; (0, -1) before the first."""
        return self._state.served

    async def start(self) -> None:
        """Take the digest of the engine's weights, then follow the offers."""
        await self._loader.begin()
        self._tasks = ChannelTasks()
        self._tasks.spawn(self._follow_offers())
        self._tasks.spawn(self._pursue())

    async def wait_for(self, version: int) -> None:
        """Wait until at least this version is served."""
        async with self._served:
            await self._served.wait_for(lambda: self._state.served[1] >= version)

    def rest(self) -> None:
        """Free the buffers that the next version does not need; call it while holding ``pace``."""
        self._loader.rest()

    def metrics(self) -> dict[str, float]:
        """Return weights/{version,seconds,gbytes_per_s,shared,load_seconds,failures,failed_loads}.

        These are of the served version, the last transfer and the last load. ``shared`` is 1 if the
        last transfer was by shared memory. ``load_seconds`` is from the last byte until the engine
        serves; the engine itself reports its pause. ``failures`` counts since the start,
        ``failed_loads`` how often the newest version was loaded in vain.
        """
        counts = {
            "weights/failures": self._state.failures,
            "weights/failed_loads": self._state.failed_loads,
        }
        return {**self._values, **self._loader.values} | {
            name: float(count) for name, count in counts.items()
        }

    async def join(self) -> None:
        """Wait forever; raise the error that stopped the channel, if one does."""
        assert self._tasks is not None, "start the receiver first"
        await self._tasks.join()

    async def close(self) -> None:
        """Cancel a running transfer; wait a second at most."""
        self._watch.cancel("the server is leaving")
        self._neighbour.leave()
        if self._tasks is not None:
            await self._tasks.cancel()
        if self._communicator is not None:
            closing = self._communicator.close()
            self._communicator = None
            await in_thread(lambda: closing.join(1.0), "weights-join")
        await in_thread(self._questions.disconnect, "weights-disconnect")

    # ------------------------------------------------------------------------------------------
    # offers

    async def _follow_offers(self) -> None:
        async for offer in self._bus.watch_last(WEIGHTS):
            assert isinstance(offer, wire.WeightsOffer)
            if offer.epoch > self._receiving_epoch:
                self._watch.cancel(f"the learner of epoch {offer.epoch} took over")
            # it may read the engine's weights
            async with self._pace if offer.adapter is not None else nullcontext():
                problem = await self._loader.found(offer)
            refused = self._state.offered(offer)
            self.refused = ""
            if offer.plan not in self._state.plans and self._state.newest is offer:
                difference = problem or await self._questions.explain(
                    offer, self._loader.plan(offer.adapter)
                )
                self._state.refuse(offer, "base" if problem else "layout", difference)
                is_known = self._difference == difference
                self._difference = difference
                self.refused = problem or (
                    f"epoch {offer.epoch} version {offer.version} "
                    f"is another model than the one here: {difference}"
                )
                if not is_known:  # all versions of a run have the same layout
                    log.error("weights: %s", self.refused)
            elif refused:
                log.warning("weights: offer refused: %s", refused)
            self._changed.set()

    # ---------------------------------------------------------------------------------------
    # transfers

    async def _pursue(self) -> None:
        while True:
            async with self._pace:
                action = self._state.next(time.monotonic())
                if isinstance(action, JoinTransfer):
                    await self._attempt(action.offer, self._receive)
                elif isinstance(action, AdoptVersion):
                    await self._attempt(action.offer, self._adopt)
                elif isinstance(action, CheckSnapshot):
                    await self._look()
            if isinstance(action, WaitForOffer):
                try:
                    until = action.until
                    async with asyncio.timeout(
                        None if until is None else max(0.0, until - time.monotonic())
                    ):
                        await self._changed.wait()
                except TimeoutError:
                    pass
                self._changed.clear()

    async def _attempt(
        self, offer: wire.WeightsOffer, step: Callable[[wire.WeightsOffer], Awaitable[str]]
    ) -> None:
        try:
            digest = await step(offer)
        except RequestFailed as error:
            self._state.failed(time.monotonic(), counts=False)
            if self._waiting.due(time.monotonic()):
                log.info(
                    "weights: waiting for epoch %d version %d: %s",
                    offer.epoch,
                    offer.version,
                    error,
                )
        except TransferFailed as error:
            self.last_error = str(error)
            difference = str(error) if isinstance(error, OfferRefused) else ""
            delay_s = self._state.failed(time.monotonic(), offer=offer, difference=difference)
            self._say_failed(offer, delay_s)
        else:
            self._waiting.over()
            self._state.taken(offer, digest)
            self.last_error = ""
            self._values["weights/version"] = float(offer.version)
            async with self._served:
                self._served.notify_all()

    def _say_failed(self, offer: wire.WeightsOffer, delay_s: float) -> None:
        """Log a failed attempt; those of a load that fails again and again less and less often."""
        if not self._state.repeats_loads:
            self._repeating.over()
        elif not self._repeating.due(time.monotonic()):
            return
        error = self.problem or self.last_error
        log.warning(
            "weights: epoch %d version %d: %s; again in %.1f s",
            offer.epoch,
            offer.version,
            error,
            delay_s,
        )

    @property
    def problem(self) -> str:
        """Why no version can be served, one line; empty while one is, or may soon be."""
        if self.refused or not self._state.repeats_loads:
            return self.refused
        return f"loaded in vain {self._state.failed_loads} times: {self.last_error}"

    @property
    def refusal(self) -> wire.OfferRefusal | None:
        """Why the newest offer cannot be served here, as others are told."""
        return self._state.refusal

    async def _adopt(self, offer: wire.WeightsOffer) -> str:
        await self._loader.adopt(offer)
        return offer.digest

    async def _receive(self, offer: wire.WeightsOffer) -> str:
        """Join, receive, check and load; return the digest.

        Raises:
            RequestFailed: if the learner does not answer, or has something newer.
            TransferFailed: if it was refused, interrupted, or the bytes are wrong.
        """
        plan = self._loader.plan(offer.adapter)
        window = self._look_over(offer)
        answer = await self._questions.join(offer, plan, self._takes(offer, window))
        if answer.error or answer.version != offer.version:
            raise RequestFailed(answer.error or f"it sends version {answer.version}")
        if self._workers is not None and answer.carrier in self._workers.takes(offer):
            return await self._receive_in_workers(self._workers, answer, offer)
        arrival = self._loader.take(plan, on_device=CARRIERS[answer.carrier].on_gpu)
        communicator = self._communicator
        self._communicator = None
        watch = WaitMonitor()
        self._receiving_epoch = offer.epoch
        self._watch = watch
        self._lost[answer.carrier] += 1  # until it has arrived
        start = time.monotonic()
        taking = partial(
            self._take,
            answer,
            offer,
            arrival,
            communicator=communicator,
            watch=watch,
            window=window,
        )
        with self._spans.work("weights"):
            received = await patiently(
                in_thread(taking, "weights-receive"), watch, answer.timeout_s
            )
        self._communicator = received.communicator
        self._lost[answer.carrier] = 0
        self._values["weights/shared"] = float(answer.carrier in READ)
        await self._loader.arrived(arrival, received.digest, offer, time.monotonic() - start)
        return received.digest

    async def _receive_in_workers(
        self, workers: EngineWorkers, answer: wire.WeightsSession, offer: wire.WeightsOffer
    ) -> str:
        """Have the engine's workers receive and load a version; return the digest.

        Raises:
            TransferFailed: if one of them failed.
        """
        watch = self._watch = WaitMonitor()
        self._receiving_epoch = offer.epoch
        start = time.monotonic()
        keys = self._questions.keys
        self._lost[answer.carrier] += 1
        self._state.loading()
        lines = StoreMessages(await in_thread(lambda: self._questions.connect(answer), "weights-connect"),
                              answer.session, watch)  # fmt: skip

        async def go() -> None:
            if (
                await in_thread(lambda: wait_for_go(lines, answer.timeout_s), "weights-go")
                == CHANGES
            ):
                raise TransferFailed(
                    "the learner sends only changes, which the engine's workers cannot use"
                )

        transfer = WorkerTransfer(
            session=answer,
            digest=offer.digest,
            plan=self.plan.text,
            segment=offer.segment,
            public=keys.public,
            secret=keys.secret.decode(),
            connect_timeout_s=self._settings.connect_timeout_s,
        )
        try:
            with self._spans.work("weights"):
                digest = await workers.receive(transfer, offer, go)
        except RuntimeError as error:  # of torch, for example out of memory
            raise TransferFailed(f"loading failed: {first_line(error)}") from error
        seconds = time.monotonic() - start
        self._lost[answer.carrier] = 0
        self._values["weights/shared"] = float(answer.carrier in READ)
        self._loader.note_transfer(self.plan.size_bytes, seconds)
        return digest

    def _takes(
        self, offer: wire.WeightsOffer, window: SegmentReader | None
    ) -> dict[wire.Carrier, int]:
        """Return how this server can take the offered version, best first."""
        device = self._loader.device
        if offer.epoch != self._lost_epoch:  # another learner, perhaps on another host
            self._lost_epoch = offer.epoch
            self._lost.clear()
        return accepted_carriers(
            reads=None if window is None else reading_carrier(on_gpu=window.on_device),
            workers=self._workers.takes(offer) if self._workers is not None else None,
            on_gpu=device.type == "cuda" and gpu_uuid(device) not in offer.devices,
            failed=[carrier for carrier, times in self._lost.items() if times >= MAX_LOST],
        )

    def carriers(self) -> list[str]:
        """Return how this server can take weights, best first; ipc and shared only from a learner
        of this host.
        """
        on_gpu = self._loader.device.type == "cuda"
        workers = self._workers.carriers if self._workers is not None else None
        reads = reading_carrier(on_gpu=on_gpu)
        carriers = list(accepted_carriers(reads=reads, workers=workers, on_gpu=on_gpu))
        return [*carriers, *(["snapshot"] if self._poller is not None else [])]

    def _look_over(self, offer: wire.WeightsOffer) -> SegmentReader | None:
        """Return a window on the learner's memory, None if the bytes have to be sent."""
        if not offer.segment:
            return None
        last_problem = self._neighbour.problem
        window = self._neighbour.reach(offer.segment, self._loader.plan(offer.adapter))
        if self._neighbour.problem not in ("", last_problem):
            problem = self._neighbour.problem
            log.info(
                "weights: the learner's memory cannot be read from here (%s), so it sends them",
                problem,
            )
        return window

    def _take(
        self,
        answer: wire.WeightsSession,
        offer: wire.WeightsOffer,
        arrival: IncomingVersion,
        communicator: Group | None,
        watch: WaitMonitor,
        window: SegmentReader | None,
    ) -> ReceivedVersion:
        if arrival.flat.buffer.is_cuda:
            torch.cuda.set_device(arrival.flat.buffer.device)
        try:
            host = address_towards(answer.host, answer.port)
        except OSError as error:
            raise TransferFailed(
                f"no route to the learner's {answer.host}: {error.strerror}"
            ) from None
        settings = replace(self._settings, host=host, timeout_s=answer.timeout_s)
        try:
            store = self._questions.connect(answer)
        except TransferFailed:
            if communicator is not None:
                communicator.close()
            raise
        try:
            return follow(
                store,
                answer,
                offer.digest,
                arrival=arrival,
                communicator=communicator,
                settings=settings,
                watch=watch,
                window=window,
            )
        except TransferFailed:
            store.close()  # a new connection is made: this one may have lost a reply
            raise

    # ---------------------------------------------------------------------------------------
    # snapshots

    async def _look(self) -> None:
        """Take the existing snapshot if it helps."""
        assert self._poller is not None, "no snapshot source"
        try:
            manifest = await self._poller.newest()
            if manifest is not None and await self._wants(manifest, self._poller.where):
                is_held = manifest.offer.digest == self._state.digest
                read = partial(self._read, self._poller, manifest)
                await self._attempt(manifest.offer, self._adopt if is_held else read)
        except TransferFailed as error:
            if str(error) != self.last_error:
                log.warning("weights: %s", error)
            self.last_error = str(error)
        self._state.looked(time.monotonic())

    async def _wants(self, manifest: SnapshotManifest, address: str) -> bool:
        """Return whether a snapshot is newer than the served version.

        Raises:
            TransferFailed: if it is not for this server.
        """
        offer = manifest.offer
        problem = await self._loader.found(offer)
        reason = self._state.useful(offer)
        if reason and reason != OLD:
            first = problem or self._loader.plan(offer.adapter).difference(manifest.plan)
            raise TransferFailed(f"snapshot {address}: {reason}{': ' if first else ''}{first}")
        return not reason

    async def _read(
        self, poller: SnapshotPoller, manifest: SnapshotManifest, offer: wire.WeightsOffer
    ) -> str:
        """Read, check and load a snapshot; return the digest.

        Raises:
            TransferFailed: if it cannot be read, or its bytes are wrong.
        """
        newest = self._state.newest
        self._watch = WaitMonitor()
        self._receiving_epoch = max(offer.epoch, newest.epoch if newest is not None else 0)
        start = time.monotonic()
        arrival = self._loader.take(manifest.plan)  # in host memory
        await poller.read(manifest, arrival, self._watch)
        log.info(
            "weights: epoch %d version %d read from %s", offer.epoch, offer.version, poller.where
        )
        await self._loader.arrived(arrival, offer.digest, offer, time.monotonic() - start)
        return offer.digest
