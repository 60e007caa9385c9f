"""What a server does about the offers it sees: decisions only, no clock, no network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import msgspec

from broker import wire

FIRST_RETRY_S: Final = 0.1
LAST_RETRY_S: Final = 5.0


@dataclass(frozen=True)
class Adopt:
    """The bytes are here already: take the offer's version without a transfer."""

    offer: wire.WeightsOffer


@dataclass(frozen=True)
class Join:
    """Ask the learner for the offered version."""

    offer: wire.WeightsOffer


@dataclass(frozen=True)
class Wait:
    """Nothing to do before ``until`` (monotonic seconds, None: before the next offer)."""

    until: float | None


Action = Adopt | Join | Wait


class Acceptance:
    """The receiver's state.

    Args:
        plan: digest of the server's own bucket plan; those of other things that it takes are added to ``plans``.
        digest: of the weights that the server holds, None when unknown.
    """

    def __init__(self, plan: str, digest: str | None) -> None:
        self.plans, self.digest = {plan}, digest
        self.served = (0, -1)  # (epoch, version) loaded and checked
        self.newest: wire.WeightsOffer | None = None
        self.failures = 0  # since start
        self._delay_s = FIRST_RETRY_S
        self._not_before = 0.0

    def offered(self, offer: wire.WeightsOffer) -> str:
        """A new offer; the reason why it is refused, empty if it is not."""
        newest = self.newest
        if newest is not None and (offer.epoch, offer.version) <= (newest.epoch, newest.version):
            if offer == newest:
                return ""
            if not newest.digest and offer == msgspec.structs.replace(newest, digest=offer.digest):
                self.newest = offer  # the same offer, made before its digest was known
                return ""
            return f"epoch {offer.epoch} version {offer.version} is not newer than epoch {newest.epoch} version {newest.version}"
        self.newest = offer
        self._delay_s, self._not_before = FIRST_RETRY_S, 0.0
        if offer.plan not in self.plans:
            return f"epoch {offer.epoch} version {offer.version} is another model"
        return ""

    def next(self, now: float) -> Action:
        """What to do now."""
        offer = self.newest
        if offer is None or offer.plan not in self.plans or (offer.epoch, offer.version) <= self.served:
            return Wait(None)
        if now < self._not_before:
            return Wait(self._not_before)
        return Adopt(offer) if offer.digest == self.digest else Join(offer)

    def loading(self) -> None:
        """The engine starts to copy: until it is done, nobody knows what it holds."""
        self.digest = None

    def taken(self, offer: wire.WeightsOffer, digest: str) -> None:
        """The offered version is loaded, checked and served."""
        self.served, self.digest = (offer.epoch, offer.version), digest
        self._delay_s = FIRST_RETRY_S

    def failed(self, now: float, *, counts: bool = True) -> float:
        """An attempt failed; the seconds until the next one.

        Args:
            counts: whether it is a failure worth counting; a learner that is busy or away is none.
        """
        self.failures += counts
        delay_s, self._delay_s = self._delay_s, min(2 * self._delay_s, LAST_RETRY_S)
        self._not_before = now + delay_s
        return delay_s
