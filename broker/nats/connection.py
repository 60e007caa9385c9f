"""A connection to the broker that reconnects forever, with calls that fail as soon as it breaks.

A call that is unanswered when the connection breaks fails at once with ``Disconnected``; its caller
waits for ``connected`` and repeats it. A retry thus starts when the broker is back, not after a
timeout.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final
from urllib.parse import urlsplit

from broker.contract.permissions import INBOX
from broker.contract.sizes import Buffer
from broker.errors import BrokerUnreachable, UserError
from broker.identity.accounts import unmap_subject
from broker.identity.login import Login
from broker.nats import addresses
from broker.nats.calls import PendingCalls, fail_call
from broker.nats.client import GuardedClient, Msg, Unprotected, nats_errors
from broker.nats.nats_errors import Disconnected, NoResponders
from broker.nats.refusals import RefusalTracker
from broker.nats.server_health import ServerHealth
from broker.nats.subscription import Callback, LinkSubscription
from broker.nats.traffic import TrafficCounter
from broker.system.recent_warning import forget_warning
from broker.system.reminders import Reminders

log = logging.getLogger(__name__)

Headers = dict[str, str]

NO_ANSWER: Final = "no reply; check for a firewall, or a program that is not a NATS server"
CALL_TIMEOUT_S: Final = 5.0
CLOSE_WITHIN_S: Final = 5.0
PAUSE_S: Final = 0.02  # before a retry, to spare a connection that is not yet known to be broken
REOPEN_AFTER_S: Final = 0.5  # so that servers that refuse at once are not asked without end
STUCK_AFTER_S: Final = 30.0
# without a byte in either direction while one is due, the link counts as stuck
STALLED_AFTER_S: Final = 3.0
PING_EVERY_S: Final = 5
LOOK_EVERY_S: Final = 2.0  # at the traffic; below PING_EVERY_S
REFUSED_AFTER_S: Final = 3.0  # of refused attempts; a new key takes a moment to be accepted
REFUSALS: Final = (
    "authorization violation",
    "connection lost",
    "authentication timeout",
    "maximum control line",
)
_UNHEARD: Final = re.compile('permissions violation for subscription to "(?P<subject>[^"]+)"')
_DENIED: Final = re.compile(
    'permissions violation for publish to "(?P<subject>[^"]+)"', re.IGNORECASE
)


class NatsLink:
    """A connection with calls and subscriptions.

    Args:
        find_login: looks up whose permissions it has; called at every attempt to connect.

    Attributes:
        refused: set with the reason once the broker refuses the key again and again, as after it
            was revoked.
    """

    def __init__(self, url: str, name: str, find_login: Callable[[], Login] = Login) -> None:
        self.url = url
        self.name = name
        self.find_login = find_login
        self._login = Login()
        self.refused: asyncio.Future[UserError] = asyncio.get_running_loop().create_future()
        # the latest attempt failed because the connection would not be protected
        self._unsafe = False
        self._by_certificate = False  # the server refused this end's certificate
        self._refused_since = 0.0  # of the first of consecutive refusals; 0: not refused
        self.connected = asyncio.Event()
        self.on_disconnect: set[Callable[[], None]] = set()
        self._client = GuardedClient(self._look_up)
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
        self._tried = 0.0  # time of the client's latest connection attempt or loss
        self.refusals = RefusalTracker(self.where)
        self._doubts = ServerHealth()  # JetStream requests without a reply although connected
        self._avoid = ""  # the server that did not reply; tried last
        self.has_jetstream = False  # whether it has ever replied
        self._was_connected = False

    async def open(self, deadline_s: float | None = None) -> None:
        """Connect, retrying forever or until the deadline.

        Raises:
            BrokerUnreachable: if no broker answers before the deadline, it refuses the login, or an
                address is not valid.
        """
        addresses.split_servers(self.url)
        try:
            async with asyncio.timeout(deadline_s):
                await self._connect_unless_refused()
        except TimeoutError:
            await self._abandon()
            if self._refused_since:
                raise BrokerUnreachable(self._why_refused()) from None
            reason = f"{self._error or NO_ANSWER}; --connect-deadline waits longer"
            message = f"no broker answered at {self.where} within {deadline_s:g} s: {reason}"
            raise BrokerUnreachable(message) from None
        self._calls.inbox = self._calls.inbox.replace(INBOX, self._login.inbox, 1)
        await self.subscribe(f"{self.inbox}.*", self._calls.answer)
        if self._login.cluster is not None:
            await self._require_replies()
        self._watching = asyncio.create_task(self._watch())
        self._looking = asyncio.create_task(self._look())

    async def _require_replies(self) -> None:
        """Check that replies reach this connection; a login of the user's may be of another role or
        run.

        Raises:
            BrokerUnreachable: if they do not.
        """
        with suppress(Disconnected), self._calls.expect() as (echo, back):
            await self.send(echo, b"")
            outcomes: list[asyncio.Future[Any]] = [back, self.refused]
            await asyncio.wait(
                outcomes, timeout=CALL_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED
            )
        if self.refused.done():
            await self._abandon()
            raise self.refused.result()

    async def _connect_unless_refused(self) -> None:
        connecting = asyncio.create_task(self._connect())
        self.refused.add_done_callback(lambda _: connecting.cancel())
        try:
            await connecting
        except asyncio.CancelledError:
            if self.refused.done():
                raise self.refused.result() from None
            raise
        finally:
            connecting.cancel()
            await asyncio.gather(connecting, return_exceptions=True)
            if self.refused.done():
                await self._abandon()

    def _look_up(self) -> Login:
        try:
            self._login = self.find_login()
        # a file that is being replaced does not end a process that works
        except UserError as error:
            if not self._was_connected:
                raise
            log.warning("%s; connecting with the login read before", error)
        return self._login

    @property
    def login(self) -> Login:
        """The identity of this connection; unknown before the first attempt to connect."""
        return self._login

    async def close(self) -> None:
        """Flush and disconnect permanently; pending calls fail with Disconnected."""
        self._closing = True
        for task in (self._reopening, self._watching, self._moving, self._looking):
            if task is not None:
                task.cancel()
        await self._abandon()
        self._calls.drop(self._lost())
        self.connected.set()  # wakes tasks waiting in ``ready``

    async def ready(self) -> None:
        """Wait until there is a connection.

        Raises:
            Disconnected: if ``close`` was called.
        """
        await self.connected.wait()
        if self._closing:
            raise Disconnected("the connection was closed")

    @property
    def where(self) -> str:
        """The broker address without a password."""
        return addresses.without_passwords(self.url)

    @property
    def inbox(self) -> str:
        """The subject prefix of replies to this link."""
        return self._calls.inbox

    def next_token(self) -> str:
        """Return a token that is unique on this link, for inboxes and message ids."""
        return self._calls.next_token()

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._closing

    @property
    def clustered(self) -> bool:
        """Whether the connected server belongs to a cluster."""
        # the client has no public name for it
        return bool(self._client._server_info.get("cluster"))

    @property
    def server_id(self) -> str:
        """The id of the connected server, another one each time that it is started."""
        return str(self._client._server_info.get("server_id", ""))

    @property
    def server_version(self) -> tuple[int, int, int]:
        """The version of the connected nats-server."""
        version = self._client.connected_server_version
        return version.major, version.minor, version.patch

    @property
    def max_payload(self) -> int:
        """The most bytes that the broker accepts in one message, headers included."""
        return self._client.max_payload

    async def _connect(self) -> None:
        # a server that learns of a new key drops connections that have not logged in yet
        self._look_up()
        servers = self._servers()
        self._client = GuardedClient(self._look_up)
        self._traffic.watch(self._client)
        await self._client.connect(
            servers,
            dont_randomize=True,  # already shuffled
            name=self.name,
            error_cb=self._on_error,
            disconnected_cb=self._on_disconnected,
            reconnected_cb=self._on_connected,
            closed_cb=self._on_closed,
            max_reconnect_attempts=-1,
            # declared int, used as seconds to sleep
            reconnect_time_wait=0.25,  # type: ignore[arg-type]
            connect_timeout=3,
            ping_interval=PING_EVERY_S,
            max_outstanding_pings=2,
            flush_timeout=10.0,
            skip_subject_validation=True,
            tls=self._login.tls_context(),
        )
        for subscribed in list(self._subscribed):
            await subscribed.attach(self._client)
        await self._on_connected()

    def _servers(self) -> list[str]:
        """Return configured and discovered servers in random order, the one to avoid last."""
        servers = addresses.split_servers(self.url)
        if "@" not in self.url:
            configured = {urlsplit(server).netloc for server in servers}
            servers += [
                uri.geturl()
                for uri in self._client.discovered_servers
                if uri.netloc not in configured
            ]
        shuffled = random.sample(servers, len(servers))
        return sorted(shuffled, key=lambda server: urlsplit(server).netloc == self._avoid)

    async def _abandon(self) -> None:
        # the client fails an assertion if it never began to connect, and when it writes to a closed
        # socket
        try:
            async with asyncio.timeout(CLOSE_WITHIN_S):
                await self._client.close()
        except (OSError, nats_errors.Error, AssertionError, RuntimeError):
            log.debug("closed a connection that was not open")

    async def _on_connected(self) -> None:
        if self._waiting.said:
            log.info(
                "connected to the broker at %s%s",
                self.where,
                " again" if self._was_connected else "",
            )
            forget_warning(log)
        self._waiting.over()
        self._was_connected = True
        self._refused_since = 0.0
        self._doubts.clear()
        self.connected.set()

    async def _on_disconnected(self) -> None:
        self._tried = time.monotonic()
        self.connected.clear()
        self._calls.drop(self._lost())
        for callback in list(self.on_disconnect):
            callback()

    async def _on_closed(self) -> None:
        """Reconnect with a new client: after some server errors the old one gives up."""
        if not self._closing and self._reopening is None:
            self._reopening = asyncio.create_task(self._reopen())

    async def _reopen(self) -> None:
        while True:
            await asyncio.sleep(REOPEN_AFTER_S)
            try:
                await self._connect()
            # such as a file of the login that is being replaced
            except Exception as error:  # noqa: BLE001 - nothing else would try again
                await self._on_error(error)
                await self._abandon()
            else:
                self._reopening = None
                return

    async def _watch(self) -> None:
        """Replace a client that has silently stopped trying to connect."""
        while True:
            await asyncio.sleep(STUCK_AFTER_S / 4)
            idle = not self.connected.is_set() and self._reopening is None
            if idle and time.monotonic() - self._tried > STUCK_AFTER_S:
                log.warning(
                    "the connection to %s does not come back; opening a new one", self.where
                )
                await self._abandon()  # calls back to reopen

    async def _look(self) -> None:
        """Keep a connection while bytes move, since ping replies queue behind them; replace one
        that stopped reading.

        The client does not notice when its reader fails.
        """
        traffic = self._traffic.now()
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            if (
                self.connected.is_set()
                and self._reopening is None
                and self._client.has_stopped_reading
            ):
                log.warning("the connection to %s is no longer read; opening a new one", self.where)
                await self._abandon()  # calls back to reopen
            elif self._traffic.moved_since(traffic):
                # the client counts only ping replies as a sign of life
                self._client._pings_outstanding = 0
            traffic = self._traffic.now()

    def doubt(self, request_kind: str, waited_s: float = 0.0) -> None:
        """Record that JetStream did not reply; if that lasts, switch away from a server cut off
        from its cluster.
        """
        now = time.monotonic()
        if not self._doubts.doubt(request_kind, now, waited_s):
            return
        uri = self._client.connected_url
        if (
            uri is None
            or not self.connected.is_set()
            or self._reopening is not None
            or len(self._servers()) < 2
        ):
            return
        log.warning(
            "JetStream at %s does not answer %s; trying another server",
            uri.netloc.rpartition("@")[2],
            request_kind,
        )
        self._avoid = uri.netloc
        self._doubts.moved(now)
        self._moving = asyncio.create_task(self._abandon())  # calls back to reopen

    def trust(self, request_kind: str) -> None:
        """Record that JetStream replied to such a request."""
        self._doubts.trust(request_kind)
        self.has_jetstream = True

    async def _on_error(self, error: Exception) -> None:
        if (denied := _DENIED.search(str(error))) is not None:
            subject = unmap_subject(denied["subject"])
            self._calls.drop(self._denied(subject), subject)
            return
        self._error = addresses.why_unreachable(error)
        self._note_refusal(error)
        self._tried = now = time.monotonic()
        if not self.connected.is_set() and not self._closing and self._waiting.due(now):
            log.warning("no broker at %s (%s); trying again", self.where, self._error)

    def _note_refusal(self, error: Exception) -> None:
        """Note an attempt that will not succeed later: the server refuses the login, or this end
        the server.

        A server that requires a login may end an attempt without saying why.
        """
        self._by_certificate = addresses.refuses_certificate(error)
        self._unsafe = isinstance(error, (Unprotected, ssl.SSLError)) and not self._by_certificate
        text = str(error).lower()
        if (denied := _UNHEARD.search(text)) is not None:
            if denied["subject"].startswith(self.inbox.lower()):
                self._refuse(BrokerUnreachable(self._why_unheard()))
            else:
                log.warning(
                    "the broker at %s does not let this login hear %s",
                    self.where,
                    denied["subject"],
                )
            return
        if self.connected.is_set() or not (
            self._unsafe or self._by_certificate or any(refusal in text for refusal in REFUSALS)
        ):
            self._refused_since = 0.0
            return
        self._client.drop_attempt()
        self._refused_since = self._refused_since or time.monotonic()
        if time.monotonic() - self._refused_since > REFUSED_AFTER_S:
            self._refuse(BrokerUnreachable(self._why_refused()))

    def _refuse(self, error: UserError) -> None:
        if not self.refused.done():
            self.refused.set_result(error)

    def _denied(self, subject: str) -> UserError:
        identity = f"a {self._login.role} of its run" if self._login.role else "this login"
        return UserError(
            f"the broker at {self.where} does not allow {identity} to publish to {subject}"
        )

    def _why_unheard(self) -> str:
        identity = "operator, who sees all runs"
        if self._login.run:
            identity = f"{self._login.role} of run {self._login.run}"
        remedy = (
            "name its run with --run, or give it the permissions that `broker permissions` "
            "prints for that role"
        )
        return f"the login for {self.where} may not receive replies as the {identity}; {remedy}"

    def _why_refused(self) -> str:
        if self._unsafe:
            return f"this process does not connect to the broker at {self.where}: {self._error}"
        if (cluster := self._login.cluster) is not None and cluster.shows_something:
            return (
                f"the servers at {self.where} refuse "
                f"{cluster.why_refused(by_certificate=self._by_certificate)}"
            )
        if self._login.key is not None:
            return (
                f"the broker at {self.where} refuses the key {self._login.key.public}: it was "
                "revoked or has expired"
            )
        return (
            f"the broker at {self.where} requires a login: it was started by another user or on "
            "another host; ask for "
            "a join token (rlearner invite) and pass it with --join; for your own cluster see "
            "docs/cluster.md"
        )

    async def send(
        self, subject: str, payload: Buffer, *, reply: str = "", headers: Headers | None = None
    ) -> None:
        """Publish without confirmation.

        Raises:
            Disconnected: if there is no connection.
        """
        if not self.connected.is_set():
            raise Disconnected(f"no connection to {self.where}")
        try:
            self._traffic.wrote(len(payload))
            # nats-py declares bytes, but takes any buffer
            await self._client.publish(subject, payload, reply, headers)  # type: ignore[arg-type]
        except nats_errors.MaxPayloadError:
            raise
        # RuntimeError: uvloop's for a closed socket
        except (nats_errors.Error, OSError, RuntimeError) as error:
            raise Disconnected(str(error)) from None

    async def call(
        self,
        subject: str,
        payload: Buffer,
        *,
        headers: Headers | None = None,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> Msg:
        """Publish and wait for one reply, up to ``timeout_s`` plus the time that either may be on
        the wire.

        Raises:
            Disconnected: if the connection is down, or breaks before the reply arrives.
            NoResponders: if nothing listens on the subject.
            TimeoutError: if no reply arrives in time.
        """
        loop = asyncio.get_running_loop()
        overdue = list[asyncio.Task[None]]()
        with self._calls.expect(subject) as (reply, answered):
            await self.send(subject, payload, reply=reply, headers=headers)
            expire = partial(self._expire, answered, timeout_s)
            timer = loop.call_later(
                timeout_s, lambda: overdue.append(asyncio.create_task(expire()))
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
        fail_call(answered, TimeoutError())

    async def overdue(self, allowed_s: float) -> None:
        """Return when a message due within ``allowed_s`` can no longer be on the wire.

        Sends a message to this link itself: it queues behind everything sent to the broker and
        everything the broker has to send. When it arrives, waits as long again, up to
        ``allowed_s``. Returns early if the connection is lost or no byte moves.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            with self._calls.expect() as (echo, back):
                await self.send(echo, b"")
                traffic = self._traffic.now()
                while not (await asyncio.wait([back], timeout=STALLED_AFTER_S))[0]:
                    if not self._traffic.moved_since(traffic):
                        return
                    traffic = self._traffic.now()
                back.result()
        except Disconnected:
            return
        await asyncio.sleep(min(loop.time() - began, allowed_s))

    def _lost(self) -> Disconnected:
        return Disconnected(f"lost the connection to {self.where}")

    async def subscribe(
        self, subject: str, callback: Callback, queue: str = ""
    ) -> LinkSubscription:
        """Call ``callback`` with every message from now on, in order, one at a time, across
        reconnects.
        """
        subscribed = LinkSubscription(self.forget, subject, callback, queue)
        self._subscribed.add(subscribed)
        try:
            await subscribed.attach(self._client)
        except nats_errors.Error:
            log.debug("%s: not connected; the next connection subscribes", subject)
        return subscribed

    def forget(self, subscribed: LinkSubscription) -> None:
        """Stop restoring a subscription on new connections."""
        self._subscribed.discard(subscribed)
