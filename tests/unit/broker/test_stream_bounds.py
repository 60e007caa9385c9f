"""What a stream's bounds are while one of its replicas lags behind the others."""

from __future__ import annotations

from typing import Any, cast

import pytest

from broker.jetstream import api
from broker.nats.connection import NatsLink

LINK = cast(NatsLink, object())  # what answers stands in its place


def answering(monkeypatch: pytest.MonkeyPatch, replicas: int, *lasts: int) -> list[str]:
    """The stream ends at these sequences, answer by answer; the last one repeats."""
    asked: list[str] = []

    async def ask(
        link: NatsLink, request: str, body: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        last = lasts[min(len(asked), len(lasts) - 1)]
        asked.append(request)
        return {
            "config": {"num_replicas": replicas},
            "state": {"first_seq": 1, "last_seq": last, "messages": last},
        }

    monkeypatch.setattr(api, "call_api", ask)
    monkeypatch.setattr(api, "CATCH_UP_PAUSE_S", 0.001)
    return asked


async def test_a_replica_that_lags_behind_is_asked_until_it_has_caught_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = answering(monkeypatch, 3, 12, 13, 14, 15)
    assert await api.stream_bounds(LINK, "s", known=14) == (1, 14)
    assert asked == ["STREAM.INFO.s"] * 3


async def test_a_stream_of_one_replica_has_lost_what_it_does_not_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = answering(monkeypatch, 1, 12, 14)
    assert await api.stream_bounds(LINK, "s", known=14) == (1, 12)
    assert len(asked) == 1


async def test_replicas_that_never_catch_up_have_lost_it_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = answering(monkeypatch, 3, 12)
    monkeypatch.setattr(api, "CATCH_UP_S", 0.05)
    assert await api.stream_bounds(LINK, "s", known=14) == (1, 12)
    assert len(asked) > 1
