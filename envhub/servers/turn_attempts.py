"""Decides how a turn is sampled: which server is asked for what, and when it ends. Pure.

Events are method calls, each of which returns the next decision. Time is passed in (seconds of any
monotonic clock), and nothing here waits or sends.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from msgspec.structs import replace

from broker.contract import wire
from broker.contract.checks import MAX_REQUEST_S
from broker.contract.lengths import remaining_tokens
from envhub.servers.choose import ServerLoad, choose
from envhub.servers.sample import REQUEST_BYTES, TOKEN_BYTES
from envhub.servers.turn import SampledTurn, TurnRequest, mix, scores_problem

# after a reply without tokens, so that a server that has none is not asked in a loop
EMPTY_PAUSE_S: Final = 0.02
# between looks for a server, as nothing reports that one will come
SERVERLESS_PAUSE_S: Final = 1.0
# tokens of a prompt from which on it is worth having a group on one server
SHARED_LEAST: Final = 256
# of one turn, before it gets a priority: no server interrupts those for other work
INTERRUPTIONS_MOST: Final = 2


@dataclass(frozen=True)
class FindServers:
    """Find the servers of the policy, for ``choose_server``."""


@dataclass(frozen=True)
class AskServer:
    """Send a request and report how it ended: ``receive`` or ``fail``.

    Attributes:
        request: without its id.
        size: bytes of the request's context, for ``RequestsInFlight``.
        is_group_home: the server is the first to get the prompt of the turn's group.
    """

    server: ServerLoad
    request: wire.GenerateRequest
    size: int
    is_group_home: bool


@dataclass(frozen=True)
class AwaitRoom:
    """Wait until one of the servers, all of which are full, may have room; then ``find_room``."""

    num_servers: int


@dataclass(frozen=True)
class AwaitServers:
    """Wait until the servers may have changed, not longer; then ``resume``."""

    timeout_s: float


@dataclass(frozen=True)
class PauseTurn:
    """Wait; then ``resume``."""

    seconds: float


@dataclass(frozen=True)
class FinishTurn:
    """The turn is complete."""

    turn: SampledTurn


@dataclass(frozen=True)
class GiveUp:
    """The turn failed."""

    reason: str


Decision = FindServers | AskServer | AwaitRoom | AwaitServers | PauseTurn | FinishTurn | GiveUp


class TurnAttempts:
    """The attempts to sample one turn, until it is complete, fails too often or takes too long.

    What an interrupted attempt has sampled is kept, and the next one continues it. If the sampling
    cannot be continued (``SamplingParams.is_resumable``), the next one starts over.

    Args:
        ask: the turn. ``resume`` returns its first decision.
        max_retries: attempts after failed ones; interrupted and refused attempts do not count.
        now: when its time begins.

    Attributes:
        turn: what was sampled so far.
        failures: failed attempts so far.
        group: whose conversations begin with the same long prompt, empty if there is none; later
            turns of a conversation have a server of their own.
    """

    def __init__(self, ask: TurnRequest, max_retries: int, now: float) -> None:
        self._ask = ask
        self._max_retries = max_retries
        self._until = now + ask.timeout_s
        self._left_s = ask.timeout_s  # at the newest decision
        # leaves each retry its share of the time
        self._attempt_s = ask.timeout_s / (max_retries + 1)
        self._sticky = ask.sticky
        self._avoid: frozenset[str] = frozenset()  # what the newest attempt failed at
        self._refused: set[str] = set()  # servers that had no room, until one has
        self._interruptions = 0
        self._problem = "there is no rollout server"
        self.turn = SampledTurn()
        self.failures = 0
        self.group = ""
        if not ask.sticky and len(ask.token_ids) >= SHARED_LEAST:
            self.group = ask.episode.rpartition(".")[0].rpartition(".")[0]

    def resume(self, now: float) -> FindServers | GiveUp:
        """Go on, at first and after a wait."""
        self._left_s = self._until - now
        return FindServers() if self._left_s > 0 else self._give_up()

    def choose_server(
        self,
        servers: Sequence[ServerLoad],
        has_room: Callable[[str, int], bool],
        rng: random.Random,
        *,
        near: str = "",
    ) -> AskServer | AwaitRoom | AwaitServers:
        """Choose the server of the next attempt.

        Args:
            servers: all that serve the policy.
            has_room: whether a server is likely to take a request of this many bytes.
            near: server that got the prompt of ``group`` first, empty if none has.
        """
        size = TOKEN_BYTES * (len(self._ask.token_ids) + len(self.turn.token_ids)) + REQUEST_BYTES
        roomy = [
            server
            for server in servers
            if server.id not in self._refused and has_room(server.id, size)
        ]
        if servers and not roomy:
            return AwaitRoom(len(servers))
        if self._sticky or near in self._avoid or all(server.id != near for server in servers):
            # the group's next server takes its place
            near = ""
        server = choose(
            roomy,
            rng,
            min_version=self._ask.min_version,
            sticky=self._sticky,
            near=near,
            avoid=self._avoid,
        )
        if server is None:
            return AwaitServers(min(self._left_s, SERVERLESS_PAUSE_S))
        return AskServer(
            server,
            self._request(),
            size=size,
            is_group_home=bool(self.group) and not near and not self._sticky,
        )

    def find_room(self, waited_s: float, now: float) -> FindServers | GiveUp:
        """Go on after waiting for room, which does not count as the turn's time: a server that is
        full is no failure.
        """
        self._until += waited_s
        self._refused.clear()
        return self.resume(now)

    def fail(self, server: str, problem: str, now: float) -> FindServers | GiveUp:
        """Note that an attempt failed: no usable reply came."""
        self.failures += 1
        self._problem = f"{server}: {problem}"
        self._avoid = frozenset({server})
        return self._give_up() if self.failures > self._max_retries else self.resume(now)

    def receive(
        self, server: str, reply: wire.GenerateReply, now: float
    ) -> FindServers | PauseTurn | FinishTurn | GiveUp:
        """Note the reply to an attempt, and keep its tokens if the turn can continue from them."""
        ask = self._ask
        reason = reply.finish_reason
        if reason == "busy":
            self._refused.add(server)
            return self.resume(now)
        if ask.scores_context and reason == "stop" and (problem := scores_problem(ask, reply)):
            return self.fail(server, problem, now)
        count = len(reply.token_ids.data) // 4
        room = ask.sampling.max_tokens - len(self.turn.token_ids)
        if reason == "error" or count > room:
            excess = f"the server returned {count} tokens, at most {room} were requested"
            return self.fail(server, reply.error if reason == "error" else excess, now)
        is_whole = reason in ("stop", "length")
        if is_whole or ask.sampling.is_resumable:
            self.turn.extend(reply)
        else:
            count = 0
            if reason == "deadline":
                # the server works, and the same time would be too short again
                self._attempt_s = ask.timeout_s
        if not is_whole and len(self.turn.token_ids) >= ask.sampling.max_tokens:
            self.turn.finish_reason = "length"
            is_whole = True
        if is_whole:
            return FinishTurn(self.turn)
        self._problem = f"{server}: {reason} before the turn was complete"
        self._sticky = server
        self._avoid = frozenset({server} if reason == "abort" else ())
        self._interruptions += reason == "abort"
        if self._interruptions == INTERRUPTIONS_MOST:
            self._ask = replace(ask, priority=max(ask.priority, 1))
        return self.resume(now) if count else PauseTurn(EMPTY_PAUSE_S)

    def _give_up(self) -> GiveUp:
        bounds = f"policy {self._ask.policy}, within {self._ask.timeout_s:g} s"
        return GiveUp(
            f"no complete turn after {self.failures} failures: {self._problem} ({bounds})"
        )

    def _request(self) -> wire.GenerateRequest:
        ask = self._ask
        context = ask.token_ids
        sampling = ask.sampling
        expected = ask.expected_tokens
        high = ask.expected_high
        if count := len(self.turn.token_ids):
            context = array("i", context) + self.turn.token_ids
            # a new one, else the same random numbers would be drawn again
            seed = None if sampling.seed is None else mix(sampling.seed, count)
            sampling = replace(sampling, max_tokens=sampling.max_tokens - count, seed=seed)
            expected, high = remaining_tokens(expected, high, count, sampling.max_tokens)
        return wire.GenerateRequest(
            request_id="",
            conversation_id=ask.conversation_id,
            token_ids=wire.column(context, "<i4"),
            sampling=sampling,
            min_version=ask.min_version,
            deadline_s=min(self._attempt_s, self._left_s, MAX_REQUEST_S),
            expected_tokens=expected,
            expected_high=high,
            priority=ask.priority,
            step=ask.step,
            prompt_top_k=ask.top_k,
            prompt_logprobs=ask.scores_context,
        )
