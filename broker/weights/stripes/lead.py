"""Rank 0's side of a transfer in stripes; see ``broker.weights.stripes.stripe``. It blocks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import msgspec

from broker.errors import TransferFailed
from broker.weights.group import PEEK_EVERY_S, PeerLost, WaitMonitor
from broker.weights.plan import LayoutPlan
from broker.weights.protocol.session import TransferSettings, session_before
from broker.weights.protocol.transfer import STRIPES
from broker.weights.rendezvous.board_request import BoardStore
from broker.weights.sender.membership import StartTransfer
from broker.weights.sender.transfer import (
    SentVersion,
    SessionFailed,
    blame,
    collect,
    to_blame,
)
from broker.weights.store_messages import StoreMessages
from broker.weights.stripes.stripe import StripeOrder, StripeRank, order_key


class StripedWeights(Protocol):
    """A model of which every learner rank sends a part."""

    @property
    def own(self) -> StripeRank:
        """Rank 0's part."""
        ...

    @property
    def plans(self) -> Sequence[LayoutPlan]:
        """Plans of all ranks' stripes, in the order of the ranks."""
        ...

    def stage(self, version: int) -> str:
        """Copy a version on all ranks and return the model's digest; called in the training thread."""
        ...


def lead_stripes(
    store: BoardStore,
    start: StartTransfer,
    weights: StripedWeights,
    number: int,
    digest: str,
    settings: TransferSettings,
    watch: WaitMonitor,
) -> SentVersion:
    """Have every rank send its stripe of a version that is staged, rank 0 too.

    Args:
        number: of earlier orders.
        digest: of the model.

    Raises:
        SessionFailed: names the servers at fault; all communicators of the session are closed.
    """
    lines = StoreMessages(store, start.session, watch)
    other_ranks = range(1, len(weights.plans))
    order = StripeOrder(
        start.session,
        start.version,
        start.num_sent + 1,
        start.carrier,
        fresh=start.fresh,
        alone=start.alone,
    )

    def peek() -> None:
        blame(lines, start, None)
        for rank in other_ranks:
            if reason := lines.heard(f"sent/{rank}"):
                raise TransferFailed(f"rank {rank} of the learner: {reason}")

    try:
        collect(lines, "ready", start, settings.connect_timeout_s)
        store.set(f"stripes/{order_key(number)}", msgspec.json.encode(order).decode())
        lines.say("go", STRIPES)
        start_time = time.monotonic()
        size_bytes = weights.own.send(store, order, settings, watch, peek)
        for rank in other_ranks:
            # each bucket has a time limit there
            while lines.wait(f"sent/{rank}", PEEK_EVERY_S) is None:
                peek()
        peek()
        lines.say("digest", digest)
        collect(lines, "done", start, settings.timeout_s)
        seconds = time.monotonic() - start_time
    except TransferFailed as error:
        lines.say("stop", str(error))
        lines.say("go", str(error))
        weights.own.drop(start.carrier)
        if isinstance(error, SessionFailed):
            raise
        servers = to_blame(lines, start) if isinstance(error, PeerLost) else {}
        raise SessionFailed(str(error), servers, ours=not isinstance(error, PeerLost)) from None
    for rank in range(len(weights.plans)):
        for word in ("sent", "stripe"):
            store.delete_key(f"{start.session}/{word}/{rank}")
    store.delete_key(f"stripes/{order_key(number)}")
    lines.forget(len(start.members), 0, session_before(start.session))
    return SentVersion(None, seconds, size_bytes, True)
