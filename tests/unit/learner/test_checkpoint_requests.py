"""The learner's answers to an operator's requests, without a broker."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from broker.contract import wire
from broker.runtime.process import Stop
from learner.operator_requests import OperatorRequests


def answering(**saver: Any) -> OperatorRequests:
    """Return the service of a learner at version 5, with a checkpoint of step 2 on disk."""
    ledger, saves = (
        SimpleNamespace(state=SimpleNamespace(version=5, taken=[])),
        SimpleNamespace(written=2, **saver),
    )
    return OperatorRequests(
        cast(Any, None), cast(Any, ledger), cast(Any, saves), cast(Any, None), Stop(), None
    )


async def test_a_poll_that_a_restarted_learner_knows_nothing_of_is_refused() -> None:
    requests = answering(writing=-1, pending=False, problem="")
    reply = await requests.answer(wire.OperatorRequest(action="checkpoint", step=6))
    detail = "no checkpoint of step 6 is pending: the learner was restarted; ask again"
    assert reply == wire.OperatorReply(state="refused", step=5, detail=detail)


async def test_a_checkpoint_is_requested_although_an_earlier_one_waits_for_room() -> None:
    asked: list[str] = []
    requests = answering(
        writing=3, pending=True, problem="the disk is full", request=lambda: asked.append("now")
    )
    first = await requests.answer(wire.OperatorRequest(action="checkpoint"))
    assert first == wire.OperatorReply(state="waiting", step=5, detail="the disk is full")
    assert asked == ["now"]
    # a poll begins nothing
    again = await requests.answer(wire.OperatorRequest(action="checkpoint", step=5))
    assert (again, asked) == (first, ["now"])
