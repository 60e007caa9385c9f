"""Servers fetch the buckets through the rendezvous, encrypted and at their own pace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from broker.weights.carriers.base import WeightCarrier

if TYPE_CHECKING:
    from broker.weights.group import Group
    from broker.weights.protocol.session import TransferSettings
    from broker.weights.rendezvous.board_request import BoardStore


class CurveCarrier(WeightCarrier):
    """Its ends need nothing but a connection to the rendezvous."""

    def open_group(
        self,
        store: BoardStore,
        name: str,
        *,
        rank: int,
        size: int,
        settings: TransferSettings,
        members: Sequence[str] = (),
    ) -> Group:
        from broker.weights.curve_group import CurveReceiver, CurveSender
        from broker.weights.rendezvous.board_client import BoardClient
        from broker.weights.rendezvous.board_server import LearnerStore

        if rank == 0:
            assert isinstance(store, LearnerStore), "the sender serves the rendezvous"
            return CurveSender(store.server, name, members, settings.timeout_s)
        assert isinstance(store, BoardClient), "a receiver is connected to the rendezvous"
        return CurveReceiver(store, name, settings.timeout_s)


CURVE: Final = CurveCarrier(
    name="curve",
    description="fetched from the learner, encrypted",
    is_automatic=False,  # encryption costs time, which a trusted network need not pay
    is_independent=True,
    serves_workers=False,
)
