"""The end of a run whose teacher is served, when the broker has gone before."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from learner.offline import served_teacher
from learner.offline.config import DistillSection


class Silent:
    """Stands for bus, roster and channel: the broker never answers, everything else does as it is
    told.
    """

    run = "taught"
    link = SimpleNamespace(where="nats://gone:4222", on_disconnect=set())

    def __init__(self) -> None:
        self.closed = 0

    def key_value(self, stream: object) -> Any:
        return self

    async def put(self, key: str, message: object) -> None:
        await asyncio.Event().wait()

    async def close(self) -> None:
        self.closed += 1


async def test_a_broker_that_is_gone_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    everything: Any = Silent()
    monkeypatch.setattr(served_teacher, "STOP_TIMEOUT_S", 0.05)
    monkeypatch.setattr(served_teacher.carriers, "make_client", lambda carrier, bus: everything)
    asker = served_teacher._TeacherClient(
        everything, everything, DistillSection(teacher="t"), "zmq"
    )
    async with asyncio.timeout(60):
        await asker.close()
    assert everything.closed == 3
    assert (
        "the broker at nats://gone:4222 does not respond, so the servers of run taught are not stopped"
        in caplog.text
    )
