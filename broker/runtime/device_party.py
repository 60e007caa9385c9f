"""Decides when a process has a shared device: a pure state machine around its lease.

A learner claims a device for itself, servers share it with each other. Everyone reads the lease,
changes it by compare-and-swap, and renews its own claim. Processes compare no clocks:

- A claim has ended for a reader once its beat stayed the same for ``ttl_s`` on the reader's clock,
  which stops while the reader does not read.
- A holder counts from before it sent its last renewal, and stops ``MARGIN_S`` earlier: it has
  stopped before anyone else takes the device, if clocks run equally fast to within a tenth.
- A learner that waits comes before servers that wait, which otherwise could keep it out for ever.
"""

from __future__ import annotations

from typing import Final

import msgspec

from broker.contract import wire

# A holder that does not renew its claim for so long has lost it.
TTL_S: Final = 10.0
RENEW_S: Final = 1.0
MARGIN_S: Final = 2.0
# A lease that the broker forgot is first made again by who has the device.
ABSENT_S: Final = 2.5


class DeviceParty:
    """One process's claim to one device.

    Args:
        holder: names this start of the process.
        exclusive: nothing else may be on the device.

    Attributes:
        wanted: whether to have the device; set False only once nothing of this process is on it.
        asked: whether another process waits for this one to leave.
        listed: whether the lease had a claim of this process when it was last read or stored.
        blockers: the holders that this process waits for.
    """

    def __init__(self, holder: str, *, exclusive: bool, ttl_s: float = TTL_S) -> None:
        self.holder = holder
        self._exclusive = exclusive
        self._ttl_s = ttl_s
        self.wanted = self.asked = self.listed = False
        self.blockers: list[str] = []
        self._granted = False
        self._valid_until = self._renewed_at = float("-inf")
        # Seconds in which this process read the lease.
        self._clock = 0.0
        self._read_at: float | None = None
        # holder -> beat, granted, since when on the clock
        self._seen: dict[str, tuple[int, bool, float]] = {}
        self._absent_since: float | None = None  # on that clock

    def has(self, now: float) -> bool:
        """Return whether the device is this process's, and will be for ``MARGIN_S`` more."""
        return self.wanted and self._granted and now < self._valid_until

    def next(self, lease: wire.DeviceLease | None, now: float) -> wire.DeviceLease | None:
        """Return what to store instead of the lease just read; None: nothing.

        Args:
            lease: None if there is none.
            now: monotonic seconds of this process.
        """
        self._clock += min(now - self._read_at, 2 * RENEW_S) if self._read_at is not None else 0.0
        self._read_at = now
        if lease is not None:
            self._absent_since = None
        elif self._absent_since is None:
            self._absent_since = self._clock
        claims = list(lease.claims) if lease is not None else []
        own = next((claim for claim in claims if claim.holder == self.holder), None)
        other_claims = self._living(claims)
        self.listed = own is not None
        opposed = [claim for claim in other_claims if claim.exclusive or self._exclusive]
        # a claim that vanished with the broker's memory is made again, unless another process has
        # the device by now
        lasts = self.has(now) and not any(claim.granted for claim in opposed)
        self._granted = own.granted if own is not None else lasts
        own_claim = self._own(own, claims, other_claims, now)
        self.asked = self._granted and bool(opposed)
        self.blockers = (
            [] if self._granted else [claim.holder for claim in opposed if claim.granted]
        )
        new_claims = [
            claim if claim.holder != self.holder else own_claim
            for claim in claims
            if claim in other_claims or claim is own
        ]
        new_claims += [own_claim] if own is None else []
        remaining_claims = [claim for claim in new_claims if claim is not None]
        return wire.DeviceLease(claims=remaining_claims) if remaining_claims != claims else None

    def stored(self, lease: wire.DeviceLease, sent_at: float) -> None:
        """Note that the returned lease was stored.

        Args:
            sent_at: when it was sent, or earlier.
        """
        own = next((claim for claim in lease.claims if claim.holder == self.holder), None)
        self.listed = own is not None
        self._granted = own is not None and own.granted
        if own is not None:
            self._renewed_at = sent_at
            self._valid_until = sent_at + self._ttl_s - MARGIN_S

    def _living(self, claims: list[wire.DeviceClaim]) -> list[wire.DeviceClaim]:
        """Return the claims of others that were renewed lately."""
        sightings = {}
        for claim in claims:
            last_sighting = self._seen.get(claim.holder)
            is_same = last_sighting is not None and last_sighting[:2] == (claim.beat, claim.granted)
            sightings[claim.holder] = (
                last_sighting
                if last_sighting is not None and is_same
                else (claim.beat, claim.granted, self._clock)
            )
        self._seen = sightings
        other_claims = [claim for claim in claims if claim.holder != self.holder]
        return [
            claim
            for claim in other_claims
            if self._clock - sightings[claim.holder][2] < self._ttl_s
        ]

    def _own(
        self,
        own: wire.DeviceClaim | None,
        claims: list[wire.DeviceClaim],
        other_claims: list[wire.DeviceClaim],
        now: float,
    ) -> wire.DeviceClaim | None:
        """Return this process's claim as it should be; None: it should have none."""
        if not self.wanted:
            return None
        if own is None:
            if (
                self._absent_since is not None
                and not self._granted
                and self._clock - self._absent_since < ABSENT_S
            ):
                return None
            granted = self._granted or self._is_free(other_claims, other_claims)
            return wire.DeviceClaim(
                holder=self.holder, exclusive=self._exclusive, granted=granted, beat=0
            )
        earlier_claims = [claim for claim in claims[: claims.index(own)] if claim in other_claims]
        granted = own.granted or self._is_free(earlier_claims, other_claims)
        is_due = granted != own.granted or now - self._renewed_at >= RENEW_S
        return msgspec.structs.replace(own, granted=granted, beat=own.beat + 1) if is_due else own

    def _is_free(
        self, earlier_claims: list[wire.DeviceClaim], other_claims: list[wire.DeviceClaim]
    ) -> bool:
        """Return whether the device can be taken: a learner waits for all that have it."""
        if self._exclusive:
            return not any(claim.granted for claim in other_claims) and not any(
                claim.exclusive for claim in earlier_claims
            )
        return not any(claim.exclusive for claim in other_claims)
