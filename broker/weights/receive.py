"""A rollout server's end of the weight channel: follows the offers and brings the newest version into the engine."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Final

import torch
from torch import Tensor

from broker import wire
from broker.errors import RequestFailed, TransferFailed
from broker.jetstream import Bus
from broker.streams import WEIGHTS
from broker.weights.acceptance import OLD, Acceptance, Adopt, Join, Look, Snapshots
from broker.weights.adapter import First, Foundation
from broker.weights.buffers import Arrival, Buffers
from broker.weights.group import Communicator, Watch, connect_store, first_line
from broker.weights.lookout import Lookout
from broker.weights.plan import Plan
from broker.weights.questions import Questions
from broker.weights.snapshot import Manifest
from broker.weights.source import Source
from broker.weights.staging import plan_of
from broker.weights.threads import in_thread, patiently, spawn
from broker.weights.transfer import Received, Settings, follow

log = logging.getLogger(__name__)

Load = Callable[[Mapping[str, Tensor], wire.WeightsOffer], Awaitable[None]]

SAY_EVERY_S: Final = 10.0  # a learner that is away is mentioned this often


class Receiver:
    """Keeps one engine's weights at the newest offer.

    Args:
        server_id: as in presence.
        tensors: the engine's weights by name, as they travel; meta tensors do where the bytes cannot be read, then nothing is
            adopted without a transfer until the first one.
        load: brings the given tensors into the engine at a safe point and checks the offer's probe (``probe.check_probe``); raises
            TransferFailed when it does not match. The tensors are valid until it returns. An empty mapping: the engine holds
            these bytes already, only the version is new. The version counts as served once ``load`` has returned.
        bucket_mib: the sender's.
        dtype: what floating-point tensors travel as, by torch's name, the sender's; None: their own.
        device: where buckets arrive by nccl, a GPU; None: where the tensors lie. By gloo they arrive on the CPU. The offer says which.
        kept: the tensors given to ``load`` are read until it has returned the next time; else only until it returns.
        first: finds what adapters are put on, see ``adapter.Foundation``.
        snapshots: where to look while the learner cannot be had.
        only_snapshots: never ask the learner.
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
        settings: Settings | None = None,
        kept: bool = False,
        first: First | None = None,
        snapshots: Source | None = None,
        only_snapshots: bool = False,
    ) -> None:
        self.plan = plan_of(tensors, bucket_mib, dtype=dtype)
        self.refused = ""  # why the newest offer is not for this server, for example another model
        self.last_error = ""  # why the last attempt failed, empty after a success
        self._bus, self._tensors, self._load = bus, tensors, load
        self._device = torch.device(device) if device is not None else next(iter(tensors.values())).device
        self._settings = settings or Settings()
        self._questions = Questions(bus, server_id, self._settings.connect_timeout_s)
        self._lookout = Lookout(snapshots, bus.run) if snapshots is not None else None
        looking: Snapshots = "none" if snapshots is None else "only" if only_snapshots else "beside"
        self._state = Acceptance(self.plan.digest, None, looking)
        self._foundation = Foundation(self.plan, bucket_mib, tensors, first)
        self._buffers = Buffers(kept=kept)
        self._communicator: Communicator | None = None
        self._watch, self._receiving_epoch = Watch(), 0
        self._changed, self._served = asyncio.Event(), asyncio.Condition()
        self._tasks: list[asyncio.Task[None]] = []
        self._said = -SAY_EVERY_S
        self._values = {"weights/version": -1.0, "weights/failures": 0.0}

    @property
    def served(self) -> tuple[int, int]:
        """(epoch, version) loaded and checked; (0, -1) before the first."""
        return self._state.served

    async def start(self) -> None:
        """Take the digest of what the engine holds, then follow the offers."""
        if not any(tensor.is_meta for tensor in self._tensors.values()):
            self._state.digest = await in_thread(lambda: self._buffers.hold(self.plan, self._tensors, self._device), "weights-digest")
        self._tensors = {}  # an engine that keeps what it is given lets go of them
        self._tasks = [spawn(self._follow_offers()), spawn(self._pursue())]

    async def wait_for(self, version: int) -> None:
        """Returns once at least this version is served."""
        async with self._served:
            await self._served.wait_for(lambda: self._state.served[1] >= version)

    def metrics(self) -> dict[str, float]:
        """weights/{version,seconds,gbytes_per_s,load_seconds,failures}: served, last transfer, last load, since start.

        ``load_seconds`` is from the last byte until the engine serves; how long it stood still meanwhile is the engine's to say.
        """
        return {**self._values, "weights/failures": float(self._state.failures)}

    async def join(self) -> None:
        """Never returns; raises what stopped the channel here, if anything unexpected ever does."""
        await asyncio.gather(*self._tasks)

    async def close(self) -> None:
        """Leave whatever transfer runs; waits a second at most."""
        self._watch.cancel("the server is leaving")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._communicator is not None:
            closing, self._communicator = self._communicator.close(), None
            await in_thread(lambda: closing.join(1.0), "weights-join")

    def _staging(self, backend: str, plan: Plan) -> Arrival:
        """Where the next version arrives.

        Raises:
            TransferFailed: by nccl, and there is no GPU here.
        """
        if backend == "nccl" and self._device.type != "cuda":
            raise TransferFailed(f"the learner sends by nccl, the weights here are on {self._device.type}; set train.weights_backend=gloo")
        return self._buffers.take(plan, self._device if backend == "nccl" else torch.device("cpu"))

    # ------------------------------------------------------------------------------------------ offers

    async def _follow_offers(self) -> None:
        async for offer in self._bus.watch_last(WEIGHTS):
            assert isinstance(offer, wire.WeightsOffer)
            if offer.epoch > self._receiving_epoch:
                self._watch.cancel(f"the learner of epoch {offer.epoch} took over")
            problem = await self._found(offer)
            refused = self._state.offered(offer)
            self.refused = ""
            if offer.plan not in self._state.plans and self._state.newest is offer:
                self.refused = problem or await self._questions.explain(offer, self._foundation.plan(offer.adapter))
                log.error("weights: %s", self.refused)
            elif refused:
                log.warning("weights: offer refused: %s", refused)
            self._changed.set()

    async def _found(self, offer: wire.WeightsOffer) -> str:
        """Have what an adapter is put on, from the first offer of one on; why it cannot be had, empty when it can."""
        adapter = offer.adapter
        if adapter is None or offer.plan != self._foundation.plan(adapter).digest:
            return ""
        if not (problem := await in_thread(lambda: self._foundation.lay(adapter), "weights-base")):
            self._state.plans.add(offer.plan)
        return problem

    # --------------------------------------------------------------------------------------- transfers

    async def _pursue(self) -> None:
        while True:
            action = self._state.next(time.monotonic())
            if isinstance(action, Join):
                await self._attempt(action.offer, self._receive)
            elif isinstance(action, Adopt):
                await self._attempt(action.offer, self._adopt)
            elif isinstance(action, Look):
                await self._look()
            else:
                try:
                    async with asyncio.timeout(None if action.until is None else max(0.0, action.until - time.monotonic())):
                        await self._changed.wait()
                except TimeoutError:
                    pass
                self._changed.clear()

    async def _attempt(self, offer: wire.WeightsOffer, step: Callable[[wire.WeightsOffer], Awaitable[str]]) -> None:
        try:
            digest = await step(offer)
        except RequestFailed as error:
            self._state.failed(time.monotonic(), counts=False)
            if time.monotonic() - self._said >= SAY_EVERY_S:
                self._said = time.monotonic()
                log.info("weights: waiting for epoch %d version %d: %s", offer.epoch, offer.version, error)
        except TransferFailed as error:
            self.last_error = str(error)
            delay_s = self._state.failed(time.monotonic())
            log.warning("weights: epoch %d version %d: %s; again in %.1f s", offer.epoch, offer.version, error, delay_s)
        else:
            self._state.taken(offer, digest)
            self.last_error = ""
            self._values["weights/version"] = float(offer.version)
            async with self._served:
                self._served.notify_all()

    async def _adopt(self, offer: wire.WeightsOffer) -> str:
        await self._bring_in({}, offer)
        return offer.digest

    async def _receive(self, offer: wire.WeightsOffer) -> str:
        """Join, receive, check, load; the digest.

        Raises:
            RequestFailed: the learner does not answer, or has something newer.
            TransferFailed: refused, broken off, or the wrong bytes.
        """
        plan = self._foundation.plan(offer.adapter)
        answer = await self._questions.join(offer, plan)
        if answer.error or answer.version != offer.version:
            raise RequestFailed(answer.error or f"it sends version {answer.version}")
        arrival = self._staging(offer.backend, plan)
        communicator, self._communicator = self._communicator, None
        watch, self._receiving_epoch = Watch(), offer.epoch
        self._watch = watch
        started = time.monotonic()
        received = await patiently(
            in_thread(lambda: self._take(answer, offer, arrival, communicator, watch), "weights-receive"), watch, answer.timeout_s
        )
        self._communicator = received.communicator
        await self._arrived(arrival, received.digest, offer, time.monotonic() - started)
        return received.digest

    async def _arrived(self, arrival: Arrival, digest: str, offer: wire.WeightsOffer, seconds: float) -> None:
        self._buffers.arrived(arrival, digest)
        self._values |= {"weights/seconds": seconds, "weights/gbytes_per_s": arrival.flat.plan.size_bytes / seconds / 1e9}
        tensors = arrival.flat.tensors
        await self._bring_in(tensors if offer.adapter is None else self._foundation.merged(tensors), offer)

    def _take(
        self, answer: wire.WeightsSession, offer: wire.WeightsOffer, arrival: Arrival, communicator: Communicator | None, watch: Watch
    ) -> Received:
        if arrival.flat.buffer.is_cuda:
            torch.cuda.set_device(arrival.flat.buffer.device)
        settings = replace(self._settings, backend=offer.backend, timeout_s=answer.timeout_s)
        store = connect_store(answer.host, answer.port, settings.connect_timeout_s)
        return follow(store, answer, offer.digest, arrival, communicator, settings, watch)

    # --------------------------------------------------------------------------------------- snapshots

    async def _look(self) -> None:
        """Take the snapshot that is there, if it is of use."""
        assert self._lookout is not None, "there is nowhere to look"
        try:
            manifest = await self._lookout.newest()
            if manifest is not None and await self._wants(manifest, self._lookout.where):
                held = manifest.offer.digest == self._state.digest
                await self._attempt(manifest.offer, self._adopt if held else partial(self._read, self._lookout, manifest))
        except TransferFailed as error:
            if str(error) != self.last_error:
                log.warning("weights: %s", error)
            self.last_error = str(error)
        self._state.looked(time.monotonic())

    async def _wants(self, manifest: Manifest, where: str) -> bool:
        """Whether a snapshot is newer than what is served.

        Raises:
            TransferFailed: it is not for this server.
        """
        offer = manifest.offer
        problem = await self._found(offer)
        reason = self._state.useful(offer)
        if reason and reason != OLD:
            first = problem or self._foundation.plan(offer.adapter).difference(manifest.plan)
            raise TransferFailed(f"snapshot {where}: {reason}{': ' if first else ''}{first}")
        return not reason

    async def _read(self, lookout: Lookout, manifest: Manifest, offer: wire.WeightsOffer) -> str:
        """Read, check, load; the digest.

        Raises:
            TransferFailed: it cannot be read, or holds the wrong bytes.
        """
        newest = self._state.newest
        self._watch, self._receiving_epoch = Watch(), max(offer.epoch, newest.epoch if newest is not None else 0)
        started = time.monotonic()
        arrival = await lookout.read(manifest, self._buffers, self._watch)
        log.info("weights: epoch %d version %d read from %s", offer.epoch, offer.version, lookout.where)
        await self._arrived(arrival, offer.digest, offer, time.monotonic() - started)
        return offer.digest

    async def _bring_in(self, tensors: Mapping[str, Tensor], offer: wire.WeightsOffer) -> None:
        started = time.monotonic()
        self._state.loading()
        try:
            await self._load(tensors, offer)
        except (TransferFailed, RuntimeError) as error:
            self._buffers.load_failed()
            if isinstance(error, TransferFailed):
                raise
            raise TransferFailed(f"loading failed: {first_line(error)}") from error  # torch's own, for example out of memory
        self._values["weights/load_seconds"] = time.monotonic() - started
