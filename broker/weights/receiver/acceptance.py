"""Decides what a server does about the offers that it sees; without clock and network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import msgspec

from broker.contract import wire
from broker.contract.checks import DIFFERENCE_CHARS

FIRST_RETRY_S: Final = 0.1
LAST_RETRY_S: Final = 5.0
FIRST_LOOK_S: Final = 1.0  # after the start
LOOK_EVERY_S: Final = 2.0
OLD: Final = "not newer than the served version"
QUIET_LOADS: Final = 3  # of one version that may fail before others are told: a fault may pass


@dataclass(frozen=True)
class AdoptVersion:
    """The bytes are here: take the offer's version without a transfer."""

    offer: wire.WeightsOffer


@dataclass(frozen=True)
class JoinTransfer:
    """Ask the learner for the offered version."""

    offer: wire.WeightsOffer


@dataclass(frozen=True)
class CheckSnapshot:
    """Look for a snapshot that helps."""


@dataclass(frozen=True)
class WaitForOffer:
    """Wait until ``until`` (monotonic seconds, None: until the next offer)."""

    until: float | None


Action = AdoptVersion | JoinTransfer | CheckSnapshot | WaitForOffer
Snapshots = Literal["none", "fallback", "only"]


class OfferAcceptance:
    """State of the receiver.

    Args:
        plan: digest of the server's bucket plan; those of other accepted plans are added to
            ``plans``.
        digest: of the weights that the server holds, None if unknown.
        snapshots: ``fallback``: used while the learner cannot be reached; ``only``: the learner is
            never asked.
    """

    def __init__(self, plan: str, digest: str | None, snapshots: Snapshots = "none") -> None:
        self.plans = {plan}
        self.digest = digest
        self.served = (0, -1)  # (epoch, version) loaded and checked
        self.newest: wire.WeightsOffer | None = None
        self.failures = 0  # since start
        # of the newest offer: its bytes came, and the engine does not serve them
        self.failed_loads = 0
        self._refusal: wire.OfferRefusal | None = None
        self._is_loading = False
        self._delay_s = FIRST_RETRY_S
        self._not_before = 0.0
        self._snapshots = snapshots
        self._look_at: float | None = None  # None: ``next`` was not called yet

    def offered(self, offer: wire.WeightsOffer) -> str:
        """Take a new offer; return why it is refused, empty if it is accepted."""
        newest = self.newest
        if newest is not None and (offer.epoch, offer.version) <= (newest.epoch, newest.version):
            if offer == newest:
                return ""
            if not newest.digest and offer == msgspec.structs.replace(newest, digest=offer.digest):
                self.newest = offer  # the same offer, now with its digest
                return ""
            newer = f"epoch {newest.epoch} version {newest.version}"
            return f"epoch {offer.epoch} version {offer.version} is not newer than {newer}"
        self.newest = offer
        self._delay_s = FIRST_RETRY_S
        self._not_before = 0.0
        self.failed_loads = 0
        self._refusal = None
        if offer.plan not in self.plans:
            return f"epoch {offer.epoch} version {offer.version} is another model"
        return ""

    def next(self, now: float) -> Action:
        """Return what to do now."""
        offer = self.newest
        is_wanted = (
            offer is not None
            and offer.plan in self.plans
            and (offer.epoch, offer.version) > self.served
        )
        if is_wanted and offer is not None and now >= self._not_before:
            if offer.digest == self.digest:
                return AdoptVersion(offer)
            if self._snapshots != "only":
                return JoinTransfer(offer)
        if self._look_at is None:
            self._look_at = now + FIRST_LOOK_S  # the learner's offers come first
        retry_at = self._not_before if is_wanted and now < self._not_before else None
        if not self._looks:
            return WaitForOffer(retry_at)
        return (
            CheckSnapshot()
            if now >= self._look_at
            else WaitForOffer(min(self._look_at, retry_at or self._look_at))
        )

    @property
    def _looks(self) -> bool:
        """Return whether to look for snapshots: the learner is not asked, did not answer, or has
        offered nothing.
        """
        alone = self.newest is None or self._delay_s > FIRST_RETRY_S
        return self._snapshots == "only" or (self._snapshots == "fallback" and alone)

    def looked(self, now: float) -> None:
        """Note that snapshots were checked; the next check is a little later."""
        self._look_at = now + LOOK_EVERY_S

    def useful(self, offer: wire.WeightsOffer) -> str:
        """Return why a snapshot, by its offer, cannot be used here; empty if it can. The text is
        stable.
        """
        newest = self.newest
        if (offer.epoch, offer.version) <= self.served:
            return OLD
        if offer.plan not in self.plans:
            return f"epoch {offer.epoch} version {offer.version} is another model than the one here"
        if newest is not None and offer.epoch < newest.epoch and offer.version > newest.version:
            newer = f"epoch {newest.epoch} version {newest.version}"
            return f"epoch {offer.epoch} version {offer.version} was overtaken by {newer}"
        return ""

    def loading(self) -> None:
        """Note that the engine starts to copy: until it is done, its content is unknown."""
        self.digest = None
        self._is_loading = True

    def refuse(self, offer: wire.WeightsOffer, kind: wire.RefusalKind, difference: str) -> None:
        """Note that the offer is of another model than the one here."""
        if offer is self.newest:
            self._refusal = _refusal(offer, kind, difference)

    @property
    def refusal(self) -> wire.OfferRefusal | None:
        """Why the newest offer cannot be served here, once that is certain."""
        refusal = self._refusal
        is_certain = refusal is not None and (
            refusal.kind != "logprobs" or refusal.loads > QUIET_LOADS
        )
        return refusal if is_certain else None

    @property
    def repeats_loads(self) -> bool:
        """Whether the newest offer was loaded in vain more often than a passing fault explains."""
        return self.failed_loads > QUIET_LOADS

    def taken(self, offer: wire.WeightsOffer, digest: str) -> None:
        """Note that the offered version is loaded, checked and served."""
        self.served = (offer.epoch, offer.version)
        self.digest = digest
        self._delay_s = FIRST_RETRY_S
        self.failed_loads = 0
        self._refusal = None
        self._is_loading = False

    def failed(
        self,
        now: float,
        *,
        counts: bool = True,
        offer: wire.WeightsOffer | None = None,
        difference: str = "",
    ) -> float:
        """Note that an attempt failed; return the seconds until the next one.

        Args:
            counts: whether it counts as a failure; a busy or absent learner does not.
            offer: that was tried.
            difference: of the loaded weights from the offer's, empty if something else failed.
        """
        self.failures += counts
        is_newest = (
            offer is not None and self.newest is not None and _order(offer) == _order(self.newest)
        )
        if self._is_loading and is_newest:
            self.failed_loads += 1
            self._refusal = None
            if difference and offer is not None:
                self._refusal = _refusal(offer, "logprobs", difference, self.failed_loads)
        self._is_loading = False
        delay_s = self._delay_s
        self._delay_s = min(2 * self._delay_s, LAST_RETRY_S)
        self._not_before = now + delay_s
        return delay_s


def _order(offer: wire.WeightsOffer) -> tuple[int, int]:
    return offer.epoch, offer.version


def _refusal(
    offer: wire.WeightsOffer, kind: wire.RefusalKind, difference: str, loads: int = 0
) -> wire.OfferRefusal:
    return wire.OfferRefusal(
        epoch=offer.epoch,
        version=offer.version,
        kind=kind,
        difference=difference[:DIFFERENCE_CHARS],
        loads=loads,
    )
