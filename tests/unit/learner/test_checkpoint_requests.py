"""The learner's answers to an operator's requests, without a broker."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from broker.contract import wire
from broker.runtime.process import Stop
from learner.operator_requests import OperatorRequests


async def test_a_checkpoint_is_requested_although_an_earlier_one_waits_for_room() -> None:
    asked: list[str] = []
    saver = SimpleNamespace(written=2, writing=3, problem="the disk is full", request=lambda: asked.append("now"))
    ledger = SimpleNamespace(state=SimpleNamespace(version=5, taken=[]))
    requests = OperatorRequests(cast(Any, None), cast(Any, ledger), cast(Any, saver), cast(Any, None), Stop(), None)
    first = await requests.answer(wire.OperatorRequest(action="checkpoint"))
    assert first == wire.OperatorReply(state="waiting", step=5, detail="the disk is full")
    assert asked == ["now"]
    again = await requests.answer(wire.OperatorRequest(action="checkpoint", step=5))  # a poll begins nothing
    assert (again, asked) == (first, ["now"])
