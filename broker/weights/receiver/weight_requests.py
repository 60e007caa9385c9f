"""A receiver's requests to the learner: to be sent a version, and how its model differs."""

from __future__ import annotations

from typing import Final

from broker.contract import wire
from broker.contract.streams import WEIGHTSYNC
from broker.errors import RequestFailed, TransferFailed, WireError
from broker.jetstream.bus import Bus
from broker.jetstream.core_messages import request
from broker.weights import plan as plans
from broker.weights.group import connect_store
from broker.weights.plan import LayoutPlan
from broker.weights.sender.send import PLAN_KEY
from broker.weights.sender.weight_responses import JOIN_TIMEOUT_S
from broker.weights.threads import in_thread

MORE_S: Final = 0.5  # longer than the sender waits, so that a late response still arrives


class WeightRequests:
    """Requests of one server.

    Args:
        connect_timeout_s: time limit for reaching the learner's store.
    """

    def __init__(self, bus: Bus, server: str, connect_timeout_s: float) -> None:
        self._bus, self._server, self._connect_timeout_s = bus, server, connect_timeout_s

    async def join(self, offer: wire.WeightsOffer, mine: LayoutPlan, *, shared: bool = False) -> wire.WeightsSession:
        """Request the offered version.

        Args:
            shared: whether the learner's memory can be read here.

        Raises:
            RequestFailed: if there is no response.
        """
        join = wire.WeightsJoin(
            server=self._server, epoch=offer.epoch, version=offer.version, plan=mine.digest, shared=shared
        )
        return await request(
            self._bus, WEIGHTSYNC, str(offer.epoch), join, timeout_s=JOIN_TIMEOUT_S + MORE_S, reply=wire.WeightsSession
        )

    async def explain(self, offer: wire.WeightsOffer, mine: LayoutPlan) -> str:
        """Describe why the offer cannot be used here, with the first difference if the learner can be reached."""
        said = f"epoch {offer.epoch} version {offer.version} is another model than the one here"
        try:
            answer = await self.join(offer, mine)
            text = await in_thread(lambda: self._fetch_plan(answer), "weights-plan")
            return f"{said}: {mine.difference(plans.from_text(text))}"
        except (RequestFailed, TransferFailed, WireError) as error:
            return f"{said}: bucket plan {offer.plan}, here {mine.digest} (names not known: {error})"

    def _fetch_plan(self, answer: wire.WeightsSession) -> str:
        return plans.decoded(connect_store(answer.host, answer.port, self._connect_timeout_s).get(PLAN_KEY))
