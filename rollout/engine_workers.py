"""Connects an engine's workers to the weight channel, if they receive weights themselves. Imports
torch.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from broker.contract import wire
from broker.system.devices import device_names
from broker.weights.carriers import CARRIERS
from broker.weights.receiver.workers import EngineWorkers, WorkerTransfer
from rollout.engines.base import Engine, ReceivingEngine, UpdateMode

log = logging.getLogger(__name__)


async def engine_workers(
    engine: Engine, mode: UpdateMode, served: Callable[[float], None]
) -> EngineWorkers | None:
    """Return the workers of a started engine; None if the server's process receives for it.

    Args:
        mode: what happens to requests in flight.
        served: called with the seconds of pause when a version is served.
    """
    if not isinstance(engine, ReceivingEngine) or not (carriers := engine.worker_carriers()):
        return None

    async def receive(
        transfer: WorkerTransfer, offer: wire.WeightsOffer, go: Callable[[], Awaitable[None]]
    ) -> str:
        paused_s, digest = await engine.receive_weights(
            transfer.text(), offer.version, mode, offer.probe, go
        )
        version = f"version {offer.version} of epoch {offer.epoch}"
        num_workers = carriers[transfer.session.carrier]
        log.info(
            "serving %s, received by %d workers, generation paused for %.3f s",
            version,
            num_workers,
            paused_s,
        )
        served(paused_s)
        return digest

    claims_gpus = any(CARRIERS[carrier].claims_gpu for carrier in carriers)
    devices = await asyncio.to_thread(device_names, "auto") if claims_gpus else []
    return EngineWorkers(carriers, receive, frozenset(devices))
