"""Servers fetch the buckets through the rendezvous, encrypted and at their own pace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from broker.weights.carriers.base import SendingCarrier

if TYPE_CHECKING:
    from broker.weights.group import Group
    from broker.weights.protocol.session import TransferSettings
    from broker.weights.rendezvous.board_request import BoardStore


class CurveCarrier(SendingCarrier):
    """The server needs a route to the rendezvous."""

    name = "curve"
    description = "fetched from the learner, encrypted"
    is_automatic = False  # encryption costs time, which a trusted network need not pay
    is_independent = True
    serves_workers = False

    def open_sender(
        self, store: BoardStore, name: str, members: Sequence[str], settings: TransferSettings
    ) -> Group:
        from broker.weights.curve_group import CurveSender
        from broker.weights.rendezvous.board_server import LearnerStore

        assert isinstance(store, LearnerStore), "the sender serves the rendezvous"
        return CurveSender(store.server, name, members, settings.timeout_s)

    def open_receiver(
        self, store: BoardStore, name: str, rank: int, size: int, settings: TransferSettings
    ) -> Group:
        from broker.weights.curve_group import CurveReceiver
        from broker.weights.rendezvous.board_client import BoardClient

        assert isinstance(store, BoardClient), "a receiver is connected to the rendezvous"
        return CurveReceiver(store, name, settings.timeout_s)
