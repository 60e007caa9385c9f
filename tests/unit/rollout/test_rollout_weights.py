"""A rollout server whose weight channel breaks does not go on with old weights."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any, cast

import pytest

from broker.contract import wire
from broker.runtime.member import Member
from broker.runtime.spans import SpanRecorder
from broker.weights.receiver import receive
from rollout.config import RolloutSection
from rollout.service import RolloutService


class Broken:
    """A receiver whose work ends by something that nobody foresaw."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    async def start(self) -> None:
        pass

    async def join(self) -> None:
        raise LookupError("a tensor of another kind")


async def test_what_ends_the_weight_channel_ends_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(receive, "WeightReceiver", Broken)
    spawned: list[Coroutine[Any, Any, None]] = []
    spec = wire.RunSpec(run="r", wire_version=wire.WIRE_VERSION, epoch=0, config={}, model_path="m")
    member = cast(
        Member,
        SimpleNamespace(spec=spec, bus=None, id="s1", spawn=spawned.append, spans=SpanRecorder()),
    )
    engine = cast(Any, SimpleNamespace(weights=dict))
    service = RolloutService(member, spec, RolloutSection(), engine)
    await service._follow_weights()
    (beside,) = spawned
    with pytest.raises(LookupError, match="a tensor of another kind"):
        await asyncio.wait_for(beside, 5)
    await service._channel.close()
