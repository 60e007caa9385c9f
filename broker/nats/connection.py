"""One connection to the broker that never gives up, and calls over it that know when their answer is lost.

A call made before a disconnection and unanswered at it fails at once with ``Disconnected``; its caller waits for
``connected`` and repeats it. So a retry starts when the broker is back, not when some timeout has passed.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from typing import Final
from urllib.parse import urlsplit

from broker.contract.sizes import Buffer
from broker.errors import BrokerUnreachable
from broker.nats import addresses
from broker.nats.calls import PendingCalls, fail
from broker.nats.client import GuardedClient, Msg, nats_errors
from broker.nats.nats_errors import Disconnected, NoResponders
from broker.nats.refusals import RefusalTracker
from broker.nats.server_health import ServerHealth
from broker.nats.subscription import Callback, LinkSubscription
from broker.nats.traffic import TrafficCounter
from broker.system.reminders import Reminders

log = logging.getLogger(__name__)

NO_ANSWER: Final = "nothing has come back yet; a firewall, or a program that is not a NATS server"
CALL_TIMEOUT_S: Final = 5.0
CLOSE_WITHIN_S: Final = 5.0
PAUSE_S: Final = 0.02  # before a repetition, so that a connection not yet known to be gone is not hammered
STUCK_AFTER_S: Final = 30.0
# without a byte in either direction, after which a link that owes us bytes counts as stuck
STALLED_AFTER_S: Final = 3.0
PING_EVERY_S: Final = 5
LOOK_EVERY_S: Final = 2.0  # at the traffic; below the interval of the client's own pings


class NatsLink:
    """A connection with calls and subscriptions."""

    def __init__(self, url: str, name: str) -> None:
        self.url, self.name = url, name
        self.connected = asyncio.Event()
        self.on_disconnect: set[Callable[[], None]] = set()
        self._client = GuardedClient()
        self._closing = False
        self._waiting = Reminders()
        self._error = ""
        self._calls = PendingCalls()
        self._traffic = TrafficCounter()
        self._subscribed: set[LinkSubscription] = set()
        self._reopening: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._moving: asyncio.Task[None] | None = None
        self._looking: asyncio.Task[None] | None = None
        self._tried = 0.0  # when the client last tried anything
        self.refusals = RefusalTracker(self.where)
        self._doubts = ServerHealth()  # requests of JetStream without an answer, although connected
        self._avoid = ""  # the server that gave none, tried last
        self.has_jetstream = False  # whether it has ever answered
        self._was_connected = False

    # ------------------------------------------------------------------------------------------- life

    async def open(self, deadline_s: float | None = None) -> None:
        """Connect, trying for ever or until the deadline.

        Raises:
            BrokerUnreachable: no answer before the deadline, or no address.
        """
        addresses.split(self.url)
        try:
            async with asyncio.timeout(deadline_s):
                await self._connect()
        except TimeoutError:
            await self._abandon()
            raise BrokerUnreachable(
                f"no broker answered at {self.where} within {deadline_s:g} s: {self._error or NO_ANSWER}"
            ) from None
        await self.subscribe(f"{self.inbox}.*", self._calls.answer)
        self._watching = asyncio.create_task(self._watch())
        self._looking = asyncio.create_task(self._look())

    async def close(self) -> None:
        """Flush and disconnect for good; outstanding calls fail with Disconnected."""
        self._closing = True
        for task in (self._reopening, self._watching, self._moving, self._looking):
            if task is not None:
                task.cancel()
        await self._abandon()
        self._calls.drop(self._lost())
        self.connected.set()  # wakes those who wait in ``ready``

    async def ready(self) -> None:
        """Wait until there is a connection.

        Raises:
            Disconnected: it was closed for good.
        """
        await self.connected.wait()
        if self._closing:
            raise Disconnected("the connection was closed")

    @property
    def where(self) -> str:
        """The address without a password."""
        return addresses.without_passwords(self.url)

    @property
    def inbox(self) -> str:
        """Where answers come to; one link's own."""
        return self._calls.inbox

    def next_token(self) -> str:
        """Unique on this link; for inboxes and message ids."""
        return self._calls.next_token()

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._closing

    @property
    def clustered(self) -> bool:
        """Whether the server that we are connected to is one of a cluster."""
        return bool(self._client._server_info.get("cluster"))  # the client has no public name for it

    @property
    def server_version(self) -> tuple[int, int, int]:
        """Of the nats-server that we are connected to."""
        version = self._client.connected_server_version
        return version.major, version.minor, version.patch

    @property
    def max_payload(self) -> int:
        """Most bytes the broker takes in one message, headers included."""
        return self._client.max_payload

    async def _connect(self) -> None:
        servers = self._servers()
        self._client = GuardedClient()
        self._traffic.watch(self._client)
        await self._client.connect(
            servers,
            dont_randomize=True,  # shuffled already
            name=self.name,
            error_cb=self._on_error,
            disconnected_cb=self._on_disconnected,
            reconnected_cb=self._on_connected,
            closed_cb=self._on_closed,
            max_reconnect_attempts=-1,
            reconnect_time_wait=0.25,  # type: ignore[arg-type]  # declared int, used as seconds of a sleep
            connect_timeout=3,
            ping_interval=PING_EVERY_S,
            max_outstanding_pings=2,
            flush_timeout=10.0,
            skip_subject_validation=True,
        )
        for subscribed in list(self._subscribed):
            await subscribed.attach(self._client)
        await self._on_connected()

    def _servers(self) -> list[str]:
        """All that were named and all that the cluster has told of, in an order of chance, the one to avoid last."""
        named = addresses.split(self.url)
        known = {urlsplit(one).netloc.rpartition("@")[2] for one in named}
        told = (
            [uri.geturl() for uri in self._client.discovered_servers if uri.netloc not in known]
            if "@" not in self.url
            else []
        )
        servers = random.sample(named + told, len(named + told))
        return sorted(servers, key=lambda one: urlsplit(one).netloc == self._avoid)

    async def _abandon(self) -> None:
        """Close the client; it fails an assertion when it never began to connect, and at writing to a socket that is
        gone.
        """
        try:
            async with asyncio.timeout(CLOSE_WITHIN_S):
                await self._client.close()
        except (OSError, nats_errors.Error, AssertionError, RuntimeError):
            log.debug("closing a connection that was not open")

    async def _on_connected(self) -> None:
        if self._waiting.said:
            log.info("connected to the broker at %s%s", self.where, " again" if self._was_connected else "")
        self._waiting.over()
        self._was_connected = True
        self._doubts.clear()
        self.connected.set()

    async def _on_disconnected(self) -> None:
        self._tried = time.monotonic()
        self.connected.clear()
        self._calls.drop(self._lost())
        for callback in list(self.on_disconnect):
            callback()

    async def _on_closed(self) -> None:
        """The client gives up for good after some errors of the server; we do not."""
        if not self._closing and self._reopening is None:
            self._reopening = asyncio.create_task(self._reopen())

    async def _reopen(self) -> None:
        await asyncio.sleep(0.5)
        await self._connect()
        self._reopening = None

    async def _watch(self) -> None:
        """Take a new client should the old one stop trying without a word."""
        while True:
            await asyncio.sleep(STUCK_AFTER_S / 4)
            if (
                not self.connected.is_set()
                and self._reopening is None
                and time.monotonic() - self._tried > STUCK_AFTER_S
            ):
                log.warning("the connection to %s does not come back by itself; making a new one", self.where)
                await self._abandon()  # calls back to reopen

    async def _look(self) -> None:
        """Keep a connection whose bytes move: behind many of them the answers to the client's own pings may take long.

        Not one that is not read any more: the client does not notice when its reader fails.
        """
        before = self._traffic.now()
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            if self.connected.is_set() and self._reopening is None and self._client.has_stopped_reading:
                log.warning("the connection to %s is not read any more; making a new one", self.where)
                await self._abandon()  # calls back to reopen
            elif self._traffic.moved_since(before):
                self._client._pings_outstanding = 0  # the client counts answers to pings only
            before = self._traffic.now()

    def doubt(self, what: str, waited_s: float = 0.0) -> None:
        """JetStream did not answer that. When it lasts, the server may be cut off from its cluster: go to another
        one.
        """
        now = time.monotonic()
        if not self._doubts.doubt(what, now, waited_s):
            return
        uri = self._client.connected_url
        if uri is None or not self.connected.is_set() or self._reopening is not None or len(self._servers()) < 2:
            return
        log.warning("JetStream at %s gives no answer to %s; trying another server", uri.netloc.rpartition("@")[2], what)
        self._avoid = uri.netloc
        self._doubts.moved(now)
        self._moving = asyncio.create_task(self._abandon())  # calls back to reopen

    def trust(self, what: str) -> None:
        """JetStream answered that."""
        self._doubts.trust(what)
        self.has_jetstream = True

    async def _on_error(self, error: Exception) -> None:
        self._error = addresses.why_unreachable(error)
        self._tried = now = time.monotonic()
        if not self.connected.is_set() and not self._closing and self._waiting.due(now):
            log.warning("no broker at %s (%s); trying again", self.where, self._error)

    # ------------------------------------------------------------------------------------------ calls

    async def send(
        self, subject: str, payload: Buffer, *, reply: str = "", headers: dict[str, str] | None = None
    ) -> None:
        """Publish without any confirmation.

        Raises:
            Disconnected: there is no connection now.
        """
        if not self.connected.is_set():
            raise Disconnected(f"no connection to {self.where}")
        try:
            self._traffic.wrote(len(payload))
            await self._client.publish(subject, payload, reply, headers)  # type: ignore[arg-type]  # any buffer does
        except nats_errors.MaxPayloadError:
            raise
        except (
            nats_errors.Error,
            OSError,
            RuntimeError,
        ) as error:  # RuntimeError: uvloop's word for a socket that is gone
            raise Disconnected(str(error)) from None

    async def call(
        self, subject: str, payload: Buffer, *, headers: dict[str, str] | None = None, timeout_s: float = CALL_TIMEOUT_S
    ) -> Msg:
        """Publish and wait for the one answer; for ``timeout_s`` and for as long as the question or the answer may be
        on the wire.

        Raises:
            Disconnected: the connection is down, or broke before the answer came.
            NoResponders: nobody listens there.
            TimeoutError: no answer in time.
        """
        loop, overdue = asyncio.get_running_loop(), list[asyncio.Task[None]]()
        with self._calls.expect() as (reply, answered):
            await self.send(subject, payload, reply=reply, headers=headers)
            timer = loop.call_later(
                timeout_s, lambda: overdue.append(asyncio.create_task(self._expire(answered, timeout_s)))
            )
            try:
                answer = await answered
            finally:
                timer.cancel()
                for task in overdue:
                    task.cancel()
        if answer.headers is not None and answer.headers.get("Status") == "503":
            raise NoResponders(subject)
        return answer

    async def _expire(self, answered: asyncio.Future[Msg], timeout_s: float) -> None:
        await self.overdue(timeout_s)
        fail(answered, TimeoutError())

    async def overdue(self, allowed_s: float) -> None:
        """Return once what should have come within ``allowed_s`` cannot be on the wire any more.

        A message to ourselves goes through the broker behind everything that was sent and comes behind everything that
        the broker had to send. When it has come, what it waited behind gets as long again, up to ``allowed_s``. It is
        not waited for when the connection is gone or no byte moves.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            with self._calls.expect() as (echo, back):
                await self.send(echo, b"")
                before = self._traffic.now()
                while not (await asyncio.wait([back], timeout=STALLED_AFTER_S))[0]:
                    if not self._traffic.moved_since(before):
                        return
                    before = self._traffic.now()
                back.result()
        except Disconnected:
            return
        await asyncio.sleep(min(loop.time() - began, allowed_s))

    def _lost(self) -> Disconnected:
        return Disconnected(f"lost the connection to {self.where}")

    async def subscribe(self, subject: str, callback: Callback, queue: str = "") -> LinkSubscription:
        """Call back with every message from now on, across reconnects, in order, one at a time."""
        subscribed = LinkSubscription(self.forget, subject, callback, queue)
        self._subscribed.add(subscribed)
        try:
            await subscribed.attach(self._client)
        except nats_errors.Error:
            log.debug("%s: no connection now; the next one subscribes", subject)
        return subscribed

    def forget(self, subscribed: LinkSubscription) -> None:
        """Do not restore it on the next connection."""
        self._subscribed.discard(subscribed)
