"""One learner rank's end of transfers in stripes: it stages what it holds, and broadcasts it when
rank 0 orders it.

    rank 0 (lead)                          rank r                         receivers
    order/n = session, version, world      waits for it in the store
    size, carrier
    go = stripes                                                          learn who sends what
    stripe/0 = digest; broadcast in        stripe/r; the same in its own  receive all at once
    its communicator
    waits for sent/r              <-----   sent/r = "" or a reason
    collects done/..., as always  <-------------------------------------  done/... = "" or a reason
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Final

import msgspec
import torch
from torch import Tensor

from broker.contract.wire import Carrier
from broker.errors import TransferFailed
from broker.weights.carriers import CARRIERS
from broker.weights.group import Group, PeerLost, WaitMonitor, first_line
from broker.weights.memory.staging import StagingBuffers
from broker.weights.plan import LayoutPlan
from broker.weights.protocol.session import TransferSettings, parse_session
from broker.weights.rendezvous.board_client import BoardClient
from broker.weights.rendezvous.board_request import BoardStore
from broker.weights.store_messages import StoreMessages
from broker.weights.stripes.layout import first_elements, placed_runs
from broker.weights.stripes.partial_digest import partial_sums

log = logging.getLogger(__name__)

# the store's key for the plans of all stripes, in the order of the ranks
STRIPES_KEY: Final = "stripes"


class StripeOrder(msgspec.Struct, frozen=True):
    """Rank 0's request to broadcast a version; the fields are those of ``StartTransfer``."""

    session: str
    version: int
    world_size: int
    carrier: Carrier
    fresh: bool
    alone: bool


def group_name(name: str, number: int) -> str:
    """Return the name of a stripe's communicator in a session's."""
    return f"{name}.stripe-{number}"


def order_key(number: int) -> str:
    """Return the store's key of an order, counted from 0."""
    return f"order/{number}"


class StripeRank:
    """What one rank sends.

    Args:
        model: plan of the whole model.
        stripe: plan of what this rank holds, see ``layout.stripe_plan``.
        gpu: that carriers between GPUs send from.
    """

    def __init__(
        self, rank: int, model: LayoutPlan, stripe: LayoutPlan, gpu: torch.device | None = None
    ) -> None:
        self.rank = rank
        self.plan = stripe
        self._model = model
        self._gpu = gpu
        self._runs = placed_runs(model, stripe)
        self._staging = StagingBuffers(stripe, firsts=first_elements(stripe))
        self._groups: dict[Carrier, Group] = {}
        self._serving: threading.Thread | None = None
        self._watch = WaitMonitor()

    def stage(self, version: int, tensors: Mapping[str, Tensor]) -> Tensor:
        """Copy a version; return this rank's share of the sums for the model's digest
        (``partial_digest``).

        Args:
            tensors: by the names of the stripe's plan.
        """
        self._staging.write(version, tensors)
        self._staging.digest(version)
        with self._staging.sending(version) as staged:
            return partial_sums(self._model, self._runs, staged.flat.buffer)

    def send(
        self,
        store: BoardStore,
        order: StripeOrder,
        settings: TransferSettings,
        watch: WaitMonitor,
        peek: Callable[[], None],
    ) -> int:
        """Broadcast a staged version to the receivers; return the bytes sent.

        Raises:
            TransferFailed: if it failed; the communicator is closed.
        """
        lines = StoreMessages(store, order.session, watch)
        name = parse_session(order.session)[0]
        if order.fresh and not order.alone and order.carrier in self._groups:
            self._groups.pop(order.carrier).close()
        group = None if order.alone else self._groups.pop(order.carrier, None)
        try:
            if group is None and not order.fresh:
                raise TransferFailed(
                    f"communicator {name} is no longer known to rank {self.rank} of the learner"
                )
            if self._gpu is not None:
                torch.cuda.set_device(self._gpu)
            with self._staging.sending(order.version) as staged:
                lines.say(f"stripe/{self.rank}", staged.digest or "")
                if group is None:
                    communicator = group_name(name, self.rank)
                    group = CARRIERS[order.carrier].open_group(
                        store, communicator, rank=0, size=order.world_size, settings=settings
                    )
                group.broadcast(staged, watch, done=lambda index: None, peek=peek)
        except BaseException:
            if group is not None:
                group.close()
            raise
        if order.alone:
            group.close()
        else:
            self._groups[order.carrier] = group
        return self.plan.size_bytes

    def drop(self, carrier: Carrier) -> None:
        """Close a carrier's communicator after a transfer that failed elsewhere."""
        if (group := self._groups.pop(carrier, None)) is not None:
            group.close()

    # -------------------------------------------------------------------------------------------
    # ranks above 0

    def serve(self, store: BoardClient, settings: TransferSettings) -> None:
        """Execute rank 0's orders in a thread until ``close``, or until the rendezvous is gone."""
        self._serving = threading.Thread(
            target=self._serve, args=(store, settings), name="weights-stripe", daemon=True
        )
        self._serving.start()

    def _serve(self, store: BoardClient, settings: TransferSettings) -> None:
        orders = StoreMessages(store, "stripes", self._watch)
        number = 0
        with suppress(TransferFailed):  # rank 0 is gone, and so is this process soon
            while not self._watch.reason:
                if (text := orders.wait(order_key(number), settings.timeout_s)) is None:
                    continue
                number += 1
                self._execute(store, msgspec.json.decode(text, type=StripeOrder), settings)
        store.close()

    def _execute(self, store: BoardClient, order: StripeOrder, settings: TransferSettings) -> None:
        lines = StoreMessages(store, order.session, self._watch)

        def peek() -> None:
            if (reason := lines.heard("stop")) is not None:
                raise PeerLost(f"rank 0 stopped it: {reason}")

        try:
            self.send(store, order, settings, self._watch, peek)
        except (TransferFailed, RuntimeError) as error:
            log.warning(
                "weights: stripe %d of version %d: %s", self.rank, order.version, first_line(error)
            )
            self.drop(order.carrier)
            lines.say(f"sent/{self.rank}", first_line(error))
        else:
            lines.say(f"sent/{self.rank}")

    def close(self) -> None:
        """Cancel what is being sent and leave the communicators; wait a second at most."""
        self._watch.cancel("the learner is leaving")
        if self._serving is not None:
            self._serving.join(1.0)
        closing = [group.close() for group in self._groups.values()]
        self._groups.clear()
        for thread in closing:
            thread.join(1.0)
