"""A connection whose reader has ended, or whose broker stood still for longer than the client
waits: it is used again.
"""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import psutil
import pytest
from waits import LONG_S, until

import broker.nats.connection
from broker.contract.permissions import OPERATOR
from broker.identity.login import find_login
from broker.nats.client import nats_errors
from broker.nats.connection import NatsLink
from broker.server.private_server import BrokerServer


@pytest.fixture
def server() -> Iterator[BrokerServer]:
    with tempfile.TemporaryDirectory() as store, BrokerServer(store) as running:
        yield running


async def works(link: NatsLink) -> bool:
    """Whether a message to ourselves comes back."""
    came = asyncio.Event()

    async def note(_: object) -> None:
        came.set()

    await link.ready()
    subscribed = await link.subscribe(f"{link.inbox}.own.{link.next_token()}", note)
    await link.send(subscribed.subject, b"")
    try:
        async with asyncio.timeout(LONG_S):
            await came.wait()
    finally:
        await subscribed.close()
    return True


async def test_the_answer_to_a_ping_that_was_given_up_does_no_harm(server: BrokerServer) -> None:
    """The broker stands still, a flush gives up, and the broker answers it after all."""
    link = NatsLink(server.url, "test", partial(find_login, server.url, OPERATOR, ""))
    await link.open(LONG_S)
    reading = link._client._reading_task
    os.kill(server.pid, signal.SIGSTOP)
    try:
        await until(lambda: psutil.Process(server.pid).status() == psutil.STATUS_STOPPED)
        with pytest.raises(nats_errors.FlushTimeoutError):
            await link._client.flush(0.3)  # type: ignore[arg-type]  # declared int, used as seconds of a wait
    finally:
        os.kill(server.pid, signal.SIGCONT)
    assert await works(link)
    assert link._client._reading_task is reading
    assert not reading.done()
    await link.close()


async def test_a_client_that_has_stopped_reading_is_replaced(
    server: BrokerServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever stopped it: bytes that go out are no sign of life."""
    monkeypatch.setattr(broker.nats.connection, "LOOK_EVERY_S", 0.05)
    link = NatsLink(server.url, "test", partial(find_login, server.url, OPERATOR, ""))
    await link.open(LONG_S)
    before = link._client
    assert before._reading_task is not None
    before._reading_task.cancel()
    await until(lambda: link._client is not before)
    assert await works(link)
    await link.close()


async def test_a_connection_that_cannot_be_opened_again_at_first_is_tried_again(
    server: BrokerServer,
) -> None:
    """A file of the login is damaged while the connection is opened again."""
    good_login = find_login(server.url, OPERATOR, "")
    login = good_login
    link = NatsLink(server.url, "test", lambda: login)
    await link.open(LONG_S)
    login = replace(good_login, authority="half of a certificate")
    await link._abandon()
    await until(lambda: "authority is damaged" in link._error)
    assert not link.connected.is_set()
    login = good_login
    await until(link.connected.is_set)
    assert await works(link)
    assert link._reopening is None
    await link.close()
