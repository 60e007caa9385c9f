"""Stores the learner's offers on the broker until a newer learner fences them."""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing

from broker.contract import wire
from broker.contract.streams import WEIGHTS
from broker.errors import Fenced
from broker.jetstream.bus import Bus

log = logging.getLogger(__name__)


class OfferStore:
    """Store of one epoch's offers, each replacing the one before.

    Args:
        epoch: of this learner.
    """

    def __init__(self, bus: Bus, epoch: int) -> None:
        self._bus = bus
        self._epoch = epoch
        self._last_seq = 0

    async def begin(self) -> None:
        """Check the stored offer.

        Raises:
            Fenced: if a newer epoch has offered weights.
        """
        self._last_seq = await self._bus.last_seq(WEIGHTS)
        if self._last_seq:
            await self._check_fence()

    async def publish(self, offer: wire.WeightsOffer) -> None:
        """Store an offer.

        Raises:
            Fenced: if a newer epoch has offered weights.
        """
        while (
            sequence := await self._bus.publish(WEIGHTS, offer, expected_last_seq=self._last_seq)
        ) is None:
            self._last_seq = await self._bus.last_seq(WEIGHTS)
            await self._check_fence()
        self._last_seq = sequence

    async def _check_fence(self) -> None:
        """Raise Fenced if the newest stored offer has a newer epoch."""
        newest = None
        try:
            async with asyncio.timeout(2.0), aclosing(self._bus.watch_last(WEIGHTS)) as offers:
                newest = await anext(offers)  # nothing comes if it does not decode
        except TimeoutError:
            log.warning(
                "weights: the newest offer on the broker cannot be read; it will be replaced"
            )
        if isinstance(newest, wire.WeightsOffer) and newest.epoch > self._epoch:
            raise Fenced(
                f"epoch {newest.epoch} offers weights, this learner is epoch {self._epoch}"
            )
