"""Decides when an offer that servers refuse ends the run. Pure.

A refusal is a server's word, and a server may be broken or hostile. So it ends the run only if

- the learner finds the same kind of fault in its own offer, which ``CheckOffer`` asks for, or
- two servers of different identities refuse the offer for the same kind of reason, for a while and
  without a break.

A server that serves the offer proves that it can be loaded. Processes that joined by the same join
token have one identity; see ``identity_of``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from broker.contract import wire
from broker.identity.vouchers import signer_of

# Longer than a killed server seems alive, so that one that restarts never counts twice.
AGREE_S: Final = 10.0
REMEDIES: Final[dict[wire.RefusalKind, str]] = {
    "layout": (
        "change model, train.lora or train.backend "
        "so that servers have tensors of the same names and shapes"
    ),
    "base": (
        "start servers from the weights that the run started from, or set train.lora.send=merged"
    ),
    "logprobs": "change rollout.engine, model.dtype or train.backend",
}


@dataclass(frozen=True)
class CheckOffer:
    """Check the offer in the learner, and report to ``OfferRefusals.checked``."""

    kind: wire.RefusalKind
    version: int
    refusal: str  # the server and what it found


def identity_of(server: wire.Presence) -> str:
    """Return who vouches for a server: its join token, or the server itself without one."""
    return signer_of(server.voucher) or f"id {server.id}"


class OfferRefusals:
    """The refusals of one learner's offers.

    Args:
        epoch: of the learner.
        agree_s: how long two identities must refuse an offer if no other server may still load it.
        others_s: the same while another server may; 0: without end.
    """

    def __init__(self, epoch: int, *, others_s: float, agree_s: float = AGREE_S) -> None:
        self._epoch = epoch
        self._agree_s = agree_s
        self._others_s = others_s or math.inf
        # Newest on offer.
        self._version = -1
        self._checked: set[tuple[wire.RefusalKind, int]] = set()
        # By identity and kind, since when it refuses the offer.
        self._since: dict[tuple[str, wire.RefusalKind], float] = {}
        # One line, why the run must end; empty if it need not.
        self.verdict = ""

    def offered(self, version: int) -> None:
        """Note the newest version on offer."""
        if version != self._version:
            self._version = version
            self._since.clear()

    def pause(self) -> None:
        """Forget for how long servers have refused the offer."""
        self._since.clear()

    def look(self, servers: Iterable[wire.Presence], now: float) -> CheckOffer | None:
        """Take the servers' current reports; return what the learner should check.

        Args:
            servers: living ones, of the policy that is trained.
            now: seconds during which servers could report; the clock stops while the broker is
                away.
        """
        staying = [server for server in servers if server.state != "draining"]
        refusals = [
            (server, refusal)
            for server in staying
            if (refusal := self._refusal_of(server)) is not None
        ]
        is_loaded = any(refusal.kind == "logprobs" for _, refusal in refusals)
        # All versions of an epoch have one layout, so a server of any of them can load the offer.
        needed = self._epoch, self._version if is_loaded else 0
        serving = [
            server
            for server in staying
            if server.refusal is None and (server.epoch, server.policy_version) >= needed
        ]
        if not refusals or serving or self.verdict:
            self._since.clear()
            return None
        earlier = self._since
        keys = {(identity_of(server), refusal.kind) for server, refusal in refusals}
        self._since = {key: earlier.get(key, now) for key in keys}
        self._judge(
            refusals, now, self._agree_s if len(refusals) == len(staying) else self._others_s
        )
        return None if self.verdict else self._next_check(refusals)

    def checked(self, check: CheckOffer, difference: str) -> None:
        """Take the learner's own result: the first fault of its offer, empty if it finds none."""
        is_current = check.kind != "logprobs" or check.version == self._version
        if difference and is_current and not self.verdict:
            self._end(check.kind, f"{check.refusal}; the learner confirms it: {difference}")

    def _refusal_of(self, server: wire.Presence) -> wire.OfferRefusal | None:
        """Return a server's refusal if it is of what is on offer now."""
        refusal = server.refusal
        if refusal is None or refusal.epoch != self._epoch:
            return None
        return refusal if refusal.kind != "logprobs" or refusal.version == self._version else None

    def _judge(
        self, refusals: list[tuple[wire.Presence, wire.OfferRefusal]], now: float, wait_s: float
    ) -> None:
        for _, refusal in refusals:
            times = [since for (_, kind), since in self._since.items() if kind == refusal.kind]
            if sum(now - since >= wait_s for since in times) >= 2:
                refused = [
                    (server, server_refusal)
                    for server, server_refusal in refusals
                    if server_refusal.kind == refusal.kind
                ]
                other_ids = ", ".join(sorted(server.id for server, _ in refused[1:]))
                self._end(
                    refusal.kind, f"{_describe_refusal(*refused[0])}; {other_ids} refused it too"
                )
                return

    def _next_check(
        self, refusals: list[tuple[wire.Presence, wire.OfferRefusal]]
    ) -> CheckOffer | None:
        for server, refusal in refusals:
            key = refusal.kind, self._version if refusal.kind == "logprobs" else 0
            # A base is a digest, of which a check here could find nothing new.
            if refusal.kind != "base" and key not in self._checked:
                self._checked.add(key)
                kind, version = key
                return CheckOffer(kind, version, _describe_refusal(server, refusal))
        return None

    def _end(self, kind: wire.RefusalKind, reason: str) -> None:
        offer = f"version {max(self._version, 0)} of epoch {self._epoch}"
        advice = "and start the run again, which resumes it"
        self.verdict = (
            f"no server can load the weights, {offer}: {reason}; {REMEDIES[kind]}, {advice}"
        )


def _describe_refusal(server: wire.Presence, refusal: wire.OfferRefusal) -> str:
    return f"{server.id}: {refusal.difference}"
