"""Requests tokens until a turn is complete, from another server after a failure."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import msgspec

from broker.channel.carriers import ChannelClient
from broker.contract import wire
from broker.contract.checks import MAX_REQUEST_S
from broker.contract.lengths import remaining_tokens
from broker.errors import RequestFailed, RlearnerError, WireError
from broker.system.reminders import Reminders
from envhub.servers.choose import ServerLoad, choose
from envhub.servers.in_flight import OpenEpisodes, OpenTurn, RequestsInFlight
from envhub.servers.sample import REQUEST_BYTES, TOKEN_BYTES

log = logging.getLogger(__name__)

# for a reply that the server sends at its deadline
GRACE_S: Final = 2.0
# to twice that, between looks at servers that are full of other hubs' requests
FULL_PAUSE_S: Final = 1.0
# so that thousands of waiting turns cost a few percent of a core
LOOK_COSTS_S: Final = 0.001
# after a reply without tokens, before the next request
NOTHING_PAUSE_S: Final = 0.02
# tokens of a prompt from which on it is worth having a group on one server
SHARED_LEAST: Final = 256
PROMPTS_MOST: Final = 1024
# of one turn, before it gets a priority: no server interrupts those for other work
INTERRUPTIONS_MOST: Final = 2
# a server stays followed for this long after a request: it holds the conversation's prefix
KEPT_S: Final = 30.0


class TurnFailed(RlearnerError):
    """No server completed the turn in time."""


class _ServerBusy(RlearnerError):
    """The server has no room for another request of this hub."""


class ServerDirectory(Protocol):
    """The part of ``envhub.servers.servers.ServerRoster`` that is used here."""

    def alive(self, policy: str) -> list[wire.Presence]: ...
    def weights(self, policy: str) -> Mapping[str, float]: ...
    async def changed(self, timeout_s: float) -> None: ...


class TurnRequest(msgspec.Struct, frozen=True):
    """One turn to sample.

    Attributes:
        episode: id of the ``EpisodeTask``, for ``TurnGenerator.hurry``.
        token_ids: the whole context; an array of 4-byte integers is the cheapest to send.
        sticky: id of the server that answered the conversation's last turn.
        timeout_s: for the whole turn, retries included.
        expected_tokens, expected_high: predicted length of the whole turn, see
            ``broker.contract.lengths``.
        priority: higher ones start first.
        step: training step that the turn's group is expected in, -1 unknown.
    """

    conversation_id: str
    token_ids: Sequence[int]
    sampling: wire.SamplingParams
    episode: str = ""
    policy: str = wire.ACTOR
    min_version: int = 0
    sticky: str = ""
    timeout_s: float = 120.0
    expected_tokens: int = 0
    expected_high: int = 0
    priority: int = 0
    step: int = -1


@dataclass
class SampledTurn:
    """One turn: k tokens, k logprobs, flat pairs (policy_version, number of tokens).

    Attributes:
        reshaped: k bytes, 1 where a token was drawn from a reshaped distribution; empty: none was.
        top: the likeliest tokens at each position with their logprobs; empty if not requested or
            not supported.
    """

    token_ids: array[int] = field(default_factory=lambda: array("i"))
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    version_runs: array[int] = field(default_factory=lambda: array("i"))
    finish_reason: wire.FinishReason = "stop"
    server: str = ""
    reshaped: bytes = b""
    top: Sequence[Sequence[tuple[int, float]]] = ()

    @classmethod
    def of(
        cls,
        ids: Iterable[int],
        logprobs: Iterable[float],
        runs: Iterable[int],
        reason: wire.FinishReason,
        server: str,
    ) -> SampledTurn:
        """Return a turn made from any sequences."""
        return cls(array("i", ids), array("f", logprobs), array("i", runs), reason, server)


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
        self._prompts: dict[str, str] = {}  # group -> server that got its prompt first, newest last
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

    def _forget_prompts(self) -> None:
        while len(self._prompts) > PROMPTS_MOST:
            del self._prompts[next(iter(self._prompts))]

    async def _turn(self, ask: TurnRequest) -> SampledTurn:
        until = self._clock() + ask.timeout_s
        # leaves each retry its share of the time
        attempt_s = ask.timeout_s / (self._max_retries + 1)
        avoid: frozenset[str] = frozenset()
        interrupted = 0
        refused = set[str]()
        # the group, whose conversations begin with the same prompt; later turns have own servers
        group = ""
        if not ask.sticky and len(ask.token_ids) >= SHARED_LEAST:
            group = ask.episode.rpartition(".")[0].rpartition(".")[0]
        partial = None
        problem = "there is no rollout server"
        failures = 0
        sticky = ask.sticky
        oldest = ask.min_version
        while (left_s := until - self._clock()) > 0:
            servers = self.servers(ask.policy)
            near = "" if sticky else self._prompts.get(group, "")
            if near in avoid or all(candidate.id != near for candidate in servers):
                # the group's next server takes its place
                near = ""
            num_tokens = len(ask.token_ids)
            if partial is not None:
                num_tokens += len(partial.token_ids)
            size = TOKEN_BYTES * num_tokens + REQUEST_BYTES
            roomy = [
                candidate
                for candidate in servers
                if candidate.id not in refused and self._in_flight.has_room(candidate.id, size)
            ]
            if servers and not roomy:
                until += await self._wait_for_room(len(servers))
                refused.clear()
                continue
            server = choose(
                roomy, self._rng, min_version=oldest, sticky=sticky, near=near, avoid=avoid
            )
            if server is None:
                await self._followed.changed(min(left_s, 1.0))
                continue
            if group and not near and not sticky:
                self._prompts[group] = server.id
                self._forget_prompts()
            try:
                reply = await self._ask(
                    server, self._request(ask, partial, min(attempt_s, left_s)), size
                )
            except _ServerBusy:
                refused.add(server.id)
                continue
            except RequestFailed as error:
                failures = failures + 1
                problem = f"{server.id}: {error}"
                avoid = frozenset({server.id})
                self.retries += 1
                if failures > self._max_retries:
                    break
                continue
            is_whole = reply.finish_reason in ("stop", "length")
            if not (is_whole or ask.sampling.is_resumable):  # start over
                reply = _without_tokens(reply)
                partial = None
                if reply.finish_reason == "deadline":
                    # the server works, and the same time would be too short again
                    attempt_s = ask.timeout_s
            partial = _extend_turn(partial, reply)
            self.tokens += len(reply.token_ids.data) // 4
            if is_whole:
                return partial
            problem = f"{server.id}: {reply.finish_reason} before the turn was complete"
            sticky = server.id
            avoid = frozenset({server.id} if reply.finish_reason == "abort" else ())
            interrupted += reply.finish_reason == "abort"
            if interrupted == INTERRUPTIONS_MOST:
                ask = msgspec.structs.replace(ask, priority=max(ask.priority, 1))
            if len(partial.token_ids) >= ask.sampling.max_tokens:
                partial.finish_reason = "length"
                return partial
            if not reply.token_ids.data:
                await asyncio.sleep(NOTHING_PAUSE_S)
        bounds = f"policy {ask.policy}, within {ask.timeout_s:g} s"
        raise TurnFailed(f"no complete turn after {failures} failures: {problem} ({bounds})")

    def _request(
        self, ask: TurnRequest, partial: SampledTurn | None, deadline_s: float
    ) -> wire.GenerateRequest:
        context = ask.token_ids
        sampling = ask.sampling
        expected = ask.expected_tokens
        high = ask.expected_high
        if partial is not None and (count := len(partial.token_ids)):
            context = array("i", context) + partial.token_ids
            # a new one, else the same random numbers would be drawn again
            seed = None if sampling.seed is None else mix(sampling.seed, count)
            sampling = msgspec.structs.replace(
                sampling, max_tokens=sampling.max_tokens - count, seed=seed
            )
            expected, high = remaining_tokens(expected, high, count, sampling.max_tokens)
        return wire.GenerateRequest(
            request_id=f"{self._name}.{next(self._numbers)}",
            conversation_id=ask.conversation_id,
            token_ids=wire.column(context, "<i4"),
            sampling=sampling,
            min_version=ask.min_version,
            deadline_s=min(deadline_s, MAX_REQUEST_S),
            expected_tokens=expected,
            expected_high=high,
            priority=max(ask.priority, int(ask.episode in self._hurried)),
            step=ask.step,
        )

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

    async def _ask(
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
        if is_busy:
            raise _ServerBusy(reply.error)
        if reply.finish_reason == "error":
            raise RequestFailed(reply.error)
        count = len(reply.token_ids.data) // 4
        max_tokens = request.sampling.max_tokens
        if count > max_tokens:
            raise RequestFailed(
                f"the server returned {count} tokens, at most {max_tokens} were requested"
            )
        return reply


def mix(*values: int) -> int:
    """Return a 48-bit seed made of other seeds and counters (splitmix64)."""
    return stirred(0, *values) >> 16


def stirred(mixed: int, *values: int) -> int:
    """Return all 64 bits of ``mix``, which can be extended.

    ``mix(a, b) == stirred(stirred(0, a), b) >> 16``.
    """
    for value in values:
        mixed = (mixed + value + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        mixed ^= mixed >> 31
    return mixed


def _extend_turn(partial: SampledTurn | None, reply: wire.GenerateReply) -> SampledTurn:
    """Return what was sampled before, if anything, followed by a reply."""
    ids, logprobs, runs = (
        wire.growable_array(column)
        for column in (reply.token_ids, reply.logprobs, reply.version_runs)
    )
    if partial is not None:
        ids = partial.token_ids + ids
        logprobs = partial.logprobs + logprobs
        runs = partial.version_runs + runs
    reshaped = reply.reshaped.data if reply.reshaped is not None else b""
    return SampledTurn(
        ids,
        logprobs,
        runs,
        finish_reason=reply.finish_reason,
        server=reply.server,
        reshaped=reshaped,
        top=_top_tokens(reply),
    )


def _without_tokens(reply: wire.GenerateReply) -> wire.GenerateReply:
    ids = wire.column((), "<i4")
    logprobs = wire.column((), "<f4")
    columns: dict[str, Any] = {
        "token_ids": ids,
        "logprobs": logprobs,
        "version_runs": ids,
        "reshaped": None,
    }
    return msgspec.structs.replace(reply, top_ids=None, top_logprobs=None, **columns)


def _top_tokens(reply: wire.GenerateReply) -> list[list[tuple[int, float]]]:
    """Return the likeliest tokens at each position, without the repeated ones that fill a row."""
    count = len(reply.token_ids.data) // 4
    if reply.top_ids is None or reply.top_logprobs is None or not count:
        return []
    ids, logprobs = (
        column.array().reshape(count, -1).tolist() for column in (reply.top_ids, reply.top_logprobs)
    )
    return [list(dict(zip(*row, strict=True)).items()) for row in zip(ids, logprobs, strict=True)]
