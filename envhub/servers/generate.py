"""Requests tokens until a turn is complete, from another server after a failure."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final, Protocol

from msgspec.structs import replace

from broker.channel.carriers import ChannelClient
from broker.contract import wire
from broker.errors import RequestFailed, WireError
from broker.system.reminders import Reminders
from envhub.servers.choose import ServerLoad
from envhub.servers.in_flight import OpenEpisodes, OpenTurn, RequestsInFlight
from envhub.servers.turn import SampledTurn, TurnFailed, TurnRequest
from envhub.servers.turn_attempts import (
    AskServer,
    AwaitRoom,
    AwaitServers,
    Decision,
    FindServers,
    FinishTurn,
    GiveUp,
    PauseTurn,
    TurnAttempts,
)

log = logging.getLogger(__name__)

# for a reply that the server sends at its deadline
GRACE_S: Final = 2.0
# to twice that, between looks at servers that are full of other hubs' requests
FULL_PAUSE_S: Final = 1.0
# so that thousands of waiting turns cost a few percent of a core
LOOK_COSTS_S: Final = 0.001
# groups whose server is known
PROMPTS_MOST: Final = 1024
# a server stays followed for this long after a request: it holds the conversation's prefix
KEPT_S: Final = 30.0


class ServerDirectory(Protocol):
    """The part of ``envhub.servers.servers.ServerRoster`` that is used here."""

    def alive(self, policy: str) -> list[wire.Presence]: ...
    def weights(self, policy: str) -> Mapping[str, float]: ...
    async def changed(self, timeout_s: float) -> None: ...


class TurnGenerator:
    """Samples any number of turns at once; a cancelled turn is aborted at its server.

    Args:
        clock: seconds that count for ``TurnRequest.timeout_s``.

    Attributes:
        retries: turns requested again after a failure, so far.
        tokens: tokens sampled so far.
        open: how far the open episodes are.
    """

    def __init__(
        self,
        client: ChannelClient,
        followed: ServerDirectory,
        *,
        name: str,
        max_retries: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._client = client
        self._followed = followed
        self._name = name
        self._max_retries = max_retries
        self._rng = random.Random()
        self._numbers = itertools.count(1)
        self._in_flight = RequestsInFlight()
        # group -> server that got its prompt first, newest last
        self._prompts: dict[str, str] = {}
        self._hurried: set[str] = set()  # episodes that others wait for
        # server -> time of its last request, on the loop's clock
        self._last_requests: dict[str, float] = {}
        self._waiting: deque[asyncio.Future[None]] = deque()  # for room in a server
        self._reminders = Reminders()
        self.retries = self.tokens = 0
        self.open = OpenEpisodes()

    def servers(self, policy: str) -> list[ServerLoad]:
        """Return the followed servers that serve a policy."""
        serving = [
            presence
            for presence in self._followed.alive(policy)
            if presence.state == "serving" and presence.address
        ]
        return self._in_flight.loads(serving, self._followed.weights(policy))

    def hurry(self, episode: str) -> None:
        """Give an episode's requests a priority until ``forget``, because others wait for it."""
        self._hurried.add(episode)

    def forget(self, episode: str) -> None:
        """Note that an episode has ended."""
        self._hurried.discard(episode)
        self.open.forget(episode)

    def in_use(self) -> set[str]:
        """Return the servers with requests in flight, and those used a short time ago."""
        since = asyncio.get_running_loop().time() - KEPT_S
        busy = self._in_flight.requests
        self._last_requests = {
            server: at for server, at in self._last_requests.items() if at > since or busy(server)
        }
        return set(self._last_requests)

    async def turn(self, ask: TurnRequest) -> SampledTurn:
        """Sample one turn.

        Raises:
            TurnFailed: if no server completes it within ``ask.timeout_s`` and ``max_retries``.
        """
        turn = OpenTurn(
            ask.episode,
            self._clock(),
            ask.expected_tokens,
            high=ask.expected_high,
            max_tokens=ask.sampling.max_tokens,
        )
        count = 0
        self.open.began(turn)
        try:
            sampled = await self._turn(ask)
            count = len(sampled.token_ids)
            return sampled
        finally:
            self.open.ended(turn, count, self._clock())

    async def _turn(self, ask: TurnRequest) -> SampledTurn:
        now = self._clock()
        attempts = TurnAttempts(ask, self._max_retries, now)
        decision: Decision = attempts.resume(now)
        while True:
            match decision:
                case FindServers():
                    decision = attempts.choose_server(
                        self.servers(ask.policy),
                        self._in_flight.has_room,
                        self._rng,
                        near=self._prompts.get(attempts.group, ""),
                    )
                case AskServer():
                    decision = await self._ask(ask, attempts, decision)
                case AwaitRoom(num_servers):
                    waited_s = await self._wait_for_room(num_servers)
                    decision = attempts.find_room(waited_s, self._clock())
                case AwaitServers(timeout_s):
                    await self._followed.changed(timeout_s)
                    decision = attempts.resume(self._clock())
                case PauseTurn(seconds):
                    await asyncio.sleep(seconds)
                    decision = attempts.resume(self._clock())
                case FinishTurn(turn):
                    return turn
                case GiveUp(reason):
                    raise TurnFailed(reason)

    async def _wait_for_room(self, num_servers: int) -> float:
        """Wait until a server may take another request. Return the seconds, which do not count.

        A server that is full is no failure. Each request that ends wakes one turn.
        """
        if self._reminders.due(time.monotonic()):
            log.info(
                "all %d servers that are followed are full; %d turns wait",
                num_servers,
                len(self._waiting) + 1,
            )
        started_at = self._clock()
        freed = asyncio.get_running_loop().create_future()
        self._waiting.append(freed)
        try:
            pause_s = max(FULL_PAUSE_S, len(self._waiting) * LOOK_COSTS_S)
            # the timeout is needed, as nothing reports the end of other hubs' requests
            await asyncio.wait({freed}, timeout=pause_s * self._rng.uniform(1.0, 2.0))
        except asyncio.CancelledError:
            # its place goes to the next turn, else it would be lost
            if freed.done():
                self._admit_waiting()
            raise
        finally:
            if not freed.done():
                self._waiting.remove(freed)
        return self._clock() - started_at

    def _admit_waiting(self) -> None:
        if self._waiting:
            self._waiting.popleft().set_result(None)

    async def _ask(self, ask: TurnRequest, attempts: TurnAttempts, attempt: AskServer) -> Decision:
        """Make an attempt and report its end."""
        server = attempt.server
        if attempt.is_group_home:
            self._prompts[attempts.group] = server.id
            if len(self._prompts) > PROMPTS_MOST:
                del self._prompts[next(iter(self._prompts))]
        request = replace(
            attempt.request,
            request_id=f"{self._name}.{next(self._numbers)}",
            priority=max(attempt.request.priority, int(ask.episode in self._hurried)),
        )
        num_tokens = len(attempts.turn.token_ids)
        num_failures = attempts.failures
        try:
            reply = await self._send(server, request, attempt.size)
        except RequestFailed as error:
            decision: Decision = attempts.fail(server.id, str(error), self._clock())
        else:
            decision = attempts.receive(server.id, reply, self._clock())
        self.tokens += len(attempts.turn.token_ids) - num_tokens
        self.retries += attempts.failures - num_failures
        return decision

    async def _send(
        self, server: ServerLoad, request: wire.GenerateRequest, size: int
    ) -> wire.GenerateReply:
        is_busy = False
        self._in_flight.sent(server.id, request.expected_tokens, size)
        self._last_requests[server.id] = asyncio.get_running_loop().time()
        try:
            reply = await self._client.generate(
                server.address, request, timeout_s=request.deadline_s + GRACE_S
            )
            is_busy = reply.finish_reason == "busy"
        except WireError as error:
            raise TurnFailed(f"the request is malformed: {error}") from error
        finally:
            self._in_flight.returned(server.id, request.expected_tokens, size, is_busy=is_busy)
            if not is_busy:
                self._admit_waiting()
        return reply
