"""A receiver's requests to the learner: to be sent a version, and how its model differs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from broker.contract import wire
from broker.contract.streams import WEIGHTSYNC
from broker.errors import RequestFailed, TransferFailed, WireError
from broker.jetstream.bus import Bus
from broker.jetstream.core_messages import send_request
from broker.weights import plan as plans
from broker.weights.plan import LayoutPlan
from broker.weights.protocol.session import JOIN_TIMEOUT_S, PLAN_KEY
from broker.weights.rendezvous.board_client import BoardClient, KeyPair, RendezvousAddress
from broker.weights.threads import in_thread

MORE_S: Final = 0.5  # longer than the sender waits, so that a late response still arrives


class WeightRequests:
    """Requests of one server.

    Args:
        connect_timeout_s: time limit for reaching the learner's store.
    """

    def __init__(self, bus: Bus, server: str, connect_timeout_s: float) -> None:
        self._bus = bus
        self._server = server
        self._connect_timeout_s = connect_timeout_s
        self._epoch, self._keys = -1, KeyPair.make()
        self._client: BoardClient | None = None

    async def join(
        self, offer: wire.WeightsOffer, mine: LayoutPlan, carriers: Mapping[wire.Carrier, int]
    ) -> wire.WeightsSession:
        """Request the offered version.

        Args:
            carriers: that can be taken here, best first, with the number of ranks.

        Raises:
            RequestFailed: if there is no response.
        """
        epoch = offer.epoch
        version = offer.version
        waits_s = JOIN_TIMEOUT_S + MORE_S
        if epoch != self._epoch:
            self.disconnect()
            self._epoch, self._keys = epoch, KeyPair.make()
        join = wire.WeightsJoin(
            server=self._server,
            epoch=epoch,
            version=version,
            plan=mine.digest,
            key=self._keys.public,
            carriers=dict(carriers),
        )
        return await send_request(
            self._bus, WEIGHTSYNC, str(epoch), join, timeout_s=waits_s, reply=wire.WeightsSession
        )

    async def explain(self, offer: wire.WeightsOffer, mine: LayoutPlan) -> str:
        """Describe how the offer differs from the model here: the first tensor, if the learner can
        be reached.
        """
        try:
            answer = await self.join(offer, mine, {carrier: 1 for carrier in offer.carriers})
            text = await in_thread(lambda: self._fetch_plan(answer), "weights-plan")
            return mine.difference(plans.from_text(text))
        except (RequestFailed, TransferFailed, WireError) as error:
            return f"bucket plan {offer.plan}, here {mine.digest} (names not known: {error})"

    def _fetch_plan(self, answer: wire.WeightsSession) -> str:
        if (text := self.connect(answer).peek(PLAN_KEY)) is None:
            raise TransferFailed("the learner has no plan")
        return plans.decoded(text)

    @property
    def keys(self) -> KeyPair:
        """This server's keys at the learner of the last request."""
        return self._keys

    def connect(self, answer: wire.WeightsSession) -> BoardClient:
        """Return a connection to the learner's rendezvous, the existing one if it is still good;
        blocks.

        Raises:
            TransferFailed: if there is no answer.
        """
        address = RendezvousAddress(answer.host, answer.port, answer.key)
        if self._client is None or self._client.lost or self._client.address != address:
            self.disconnect()
            self._client = BoardClient(address, self._keys, self._connect_timeout_s)
        self._client.timeout_s = max(self._connect_timeout_s, answer.timeout_s)
        return self._client

    def disconnect(self) -> None:
        """Close the connection."""
        if self._client is not None:
            self._client.close()
            self._client = None
