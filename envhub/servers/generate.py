"""Asks rollout servers for tokens until a turn is complete: elsewhere after a failure, on from a partial output."""

from __future__ import annotations

import asyncio
import itertools
import random
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import msgspec

from broker.channel.carriers import ChannelClient
from broker.contract import wire
from broker.errors import RequestFailed, RlearnerError, WireError
from envhub.servers.choose import ServerLoad, choose

GRACE_S: Final = 2.0  # for a reply that the server sends at its deadline
NOTHING_PAUSE_S: Final = 0.02  # after a reply without tokens, before asking again
KEPT_S: Final = 30.0  # a server stays followed for this long after it was asked: the conversation's prefix is there
EXPECTED_DECAY: Final = 0.05
_NOBODY: Final[frozenset[str]] = frozenset()


class TurnFailed(RlearnerError):
    """No server completed the turn in time."""


class ServerDirectory(Protocol):
    """What is used of ``envhub.servers.servers.ServerRoster``."""

    def alive(self, policy: str) -> list[wire.Presence]: ...
    def weights(self, policy: str) -> Mapping[str, float]: ...
    async def changed(self, timeout_s: float) -> None: ...


class TurnRequest(msgspec.Struct, frozen=True):
    """One turn to be sampled.

    Attributes:
        token_ids: the whole context; an array of 4-byte integers is the cheapest to send.
        sticky: id of the server that answered the conversation's last turn.
        timeout_s: for the whole turn, retries included.
    """

    conversation_id: str
    token_ids: Sequence[int]
    sampling: wire.SamplingParams
    policy: str = wire.ACTOR
    min_version: int = 0
    sticky: str = ""
    timeout_s: float = 120.0
    expected_tokens: int = 0


@dataclass
class SampledTurn:
    """One turn: k tokens, k logprobs, flat pairs (policy_version, number of tokens).

    Attributes:
        reshaped: k bytes, 1 where a token was drawn from a reshaped distribution; empty: none was.
        top: for each token the likeliest ones and their logprobs; empty where none were asked for or the engine tells
        none.
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
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        version_runs: Sequence[int],
        finish_reason: wire.FinishReason,
        server: str,
    ) -> SampledTurn:
        """One from any sequences."""
        return cls(array("i", token_ids), array("f", logprobs), array("i", version_runs), finish_reason, server)


class TurnGenerator:
    """The hub's side of generation; any number of turns at once. A turn that is cancelled is aborted at its server.

    Attributes:
        retries: turns asked again after a failure, so far.
        tokens: tokens sampled so far.
    """

    def __init__(
        self,
        client: ChannelClient,
        followed: ServerDirectory,
        *,
        name: str,
        max_retries: int,
        rng: random.Random | None = None,
    ) -> None:
        self._client, self._followed, self._name, self._max_retries = client, followed, name, max_retries
        self._rng = rng or random.Random()
        self._numbers = itertools.count(1)
        self._outstanding: dict[str, int] = {}
        self._asked: dict[str, float] = {}  # server -> when it was asked last, on the loop's clock
        # newest presence and our outstanding requests when it came
        self._seen: dict[str, tuple[wire.Presence, int]] = {}
        self.retries = self.tokens = 0

    def servers(self, policy: str) -> list[ServerLoad]:
        """The followed servers that serve a policy."""
        weights = self._followed.weights(policy)
        serving = [one for one in self._followed.alive(policy) if one.state == "serving" and one.address]
        known = [one for one in serving if one.speed > 0 and one.slots]
        # for a server that has not worked yet
        per_slot = sum(one.speed / one.slots for one in known) / len(known) if known else 1.0
        return [
            ServerLoad(
                one.id,
                one.address,
                one.policy_version,
                one.slots,
                self._load(one),
                one.speed or per_slot * max(one.slots, 1),
                weights.get(one.id, 0.0),
            )
            for one in serving
        ]

    def in_use(self) -> set[str]:
        """Servers with outstanding requests, or asked so recently that their conversations are likely to come back."""
        recently = asyncio.get_running_loop().time() - KEPT_S
        self._asked = {
            server: at for server, at in self._asked.items() if at > recently or self._outstanding.get(server)
        }
        return set(self._asked)

    async def turn(self, ask: TurnRequest) -> SampledTurn:
        """Sample one turn.

        Raises:
            TurnFailed: no server completed it within ``ask.timeout_s`` or ``max_retries``.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + ask.timeout_s
        attempt_s = ask.timeout_s / (self._max_retries + 1)
        done, problem, failures, avoid, sticky = None, "there is no rollout server", 0, _NOBODY, ask.sticky
        while (left_s := until - loop.time()) > 0:
            server = choose(
                self.servers(ask.policy), self._rng, min_version=ask.min_version, sticky=sticky, avoid=avoid
            )
            if server is None:
                await self._followed.changed(min(left_s, 1.0))
                continue
            try:
                reply = await self._ask(server, self._request(ask, done, min(attempt_s, left_s)))
            except RequestFailed as error:
                failures, problem, avoid = failures + 1, f"{server.id}: {error}", frozenset({server.id})
                self.retries += 1
                if failures > self._max_retries:
                    break
                continue
            whole = reply.finish_reason in ("stop", "length")
            if _reshaped(ask.sampling) and not whole:
                # a guide and penalties count from the first token on: start over
                reply, done = _without_tokens(reply), None
            done = _with(done, reply)
            self.tokens += len(reply.token_ids.data) // 4
            if whole:
                return done
            problem = f"{server.id}: {reply.finish_reason} before the turn was complete"
            sticky, avoid = server.id, frozenset({server.id} if reply.finish_reason == "abort" else ())
            if len(done.token_ids) >= ask.sampling.max_tokens:
                done.finish_reason = "length"
                return done
            if not reply.token_ids.data:
                await asyncio.sleep(NOTHING_PAUSE_S)
        raise TurnFailed(
            f"no complete turn after {failures} failures: {problem} (policy {ask.policy}, within {ask.timeout_s:g} s)"
        )

    def _request(self, ask: TurnRequest, done: SampledTurn | None, deadline_s: float) -> wire.GenerateRequest:
        context, sampling = ask.token_ids, ask.sampling
        if done is not None and done.token_ids:
            context = array("i", context) + done.token_ids
            seed = None if sampling.seed is None else mix(sampling.seed, len(done.token_ids))
            sampling = msgspec.structs.replace(
                sampling, max_tokens=sampling.max_tokens - len(done.token_ids), seed=seed
            )
        return wire.GenerateRequest(
            request_id=f"{self._name}.{next(self._numbers)}",
            conversation_id=ask.conversation_id,
            token_ids=wire.column(context, "<i4"),
            sampling=sampling,
            min_version=ask.min_version,
            deadline_s=deadline_s,
            expected_tokens=ask.expected_tokens,
        )

    async def _ask(self, server: ServerLoad, request: wire.GenerateRequest) -> wire.GenerateReply:
        self._outstanding[server.id] = self._outstanding.get(server.id, 0) + 1
        self._asked[server.id] = asyncio.get_running_loop().time()
        try:
            reply = await self._client.generate(server.address, request, timeout_s=request.deadline_s + GRACE_S)
        except WireError as error:
            raise TurnFailed(f"the request breaks its own rules: {error}") from error
        finally:
            self._outstanding[server.id] -= 1
        if reply.finish_reason == "error":
            raise RequestFailed(reply.error)
        if len(reply.token_ids.data) // 4 > request.sampling.max_tokens:
            raise RequestFailed(
                f"answered {len(reply.token_ids.data) // 4} tokens, asked for at most {request.sampling.max_tokens}"
            )
        return reply

    def _load(self, presence: wire.Presence) -> int:
        """Requests in a server: what it said, and what we have sent it since."""
        ours = self._outstanding.get(presence.id, 0)
        seen = self._seen.get(presence.id)
        if seen is None or seen[0] is not presence:
            seen = self._seen[presence.id] = (presence, ours)
        return max(ours, presence.running + presence.waiting + ours - seen[1])


class ExpectedTokens:
    """Running mean of the tokens in a turn, for servers that start with the longest."""

    def __init__(self) -> None:
        self._mean = 0.0

    def add(self, tokens: int) -> None:
        """One more turn was complete."""
        self._mean += (tokens - self._mean) * EXPECTED_DECAY if self._mean else tokens

    def tokens(self) -> int:
        """What to expect; 0 when nothing is known yet."""
        return round(self._mean)


def mix(*values: int) -> int:
    """A seed of 48 bits from other seeds and counters, without structure between neighbours (splitmix64's
    finaliser).
    """
    return stirred(0, *values) >> 16


def stirred(mixed: int, *values: int) -> int:
    """All 64 bits of what ``mix`` makes a seed of; further values go on from them: ``mix(a, b) == stirred(stirred(0,
    a), b) >> 16``.
    """
    for value in values:
        mixed = (mixed + value + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        mixed ^= mixed >> 31
    return mixed


def _with(done: SampledTurn | None, reply: wire.GenerateReply) -> SampledTurn:
    """What was sampled before, if anything, and this."""
    token_ids, logprobs, version_runs = (
        wire.growing(reply.token_ids),
        wire.growing(reply.logprobs),
        wire.growing(reply.version_runs),
    )
    if done is not None:
        token_ids, logprobs, version_runs = (
            done.token_ids + token_ids,
            done.logprobs + logprobs,
            done.version_runs + version_runs,
        )
    reshaped = reply.reshaped.data if reply.reshaped is not None else b""
    return SampledTurn(token_ids, logprobs, version_runs, reply.finish_reason, reply.server, reshaped, _top(reply))


def _reshaped(sampling: wire.SamplingParams) -> bool:
    return bool(
        sampling.guides
        or sampling.logit_bias
        or sampling.frequency_penalty
        or sampling.presence_penalty
        or sampling.top_logprobs
    )


def _without_tokens(reply: wire.GenerateReply) -> wire.GenerateReply:
    empty = wire.column((), "<i4")
    return msgspec.structs.replace(
        reply,
        token_ids=empty,
        logprobs=wire.column((), "<f4"),
        version_runs=empty,
        top_ids=None,
        top_logprobs=None,
        reshaped=None,
    )


def _top(reply: wire.GenerateReply) -> list[list[tuple[int, float]]]:
    """The likeliest tokens at each sampled one. One that is repeated stands for none."""
    count = len(reply.token_ids.data) // 4
    if reply.top_ids is None or reply.top_logprobs is None or not count:
        return []
    ids, logprobs = (one.array().reshape(count, -1).tolist() for one in (reply.top_ids, reply.top_logprobs))
    return [list(dict(zip(*row, strict=True)).items()) for row in zip(ids, logprobs, strict=True)]
