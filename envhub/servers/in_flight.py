"""Counts a hub's requests in flight, and estimates loads and the progress of episodes. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from broker.contract import wire
from broker.contract.lengths import remaining_tokens
from envhub.servers.choose import ServerLoad

# engines that compute a prompt once for several conversations
SHARING: Final = frozenset({"hf", "vllm", "sglang"})
# weight of the newest turn
RATE_DECAY: Final = 0.05
# of an answered request, or more while few are there; about as many are refused
ROOM_GROWTH: Final = 1.0 / 64


@dataclass(slots=True)
class _Use:
    """Requests of this hub in one server.

    Attributes:
        tokens: that they were predicted to have when they were sent.
        size: bytes of their contexts.
        room: most such bytes that the server takes from this hub at once, as far as known.
        presence: the newest.
        requests_then: ours at its time.
    """

    requests: int = 0
    tokens: int = 0
    size: int = 0
    room: float = float("inf")
    presence: wire.Presence | None = None
    requests_then: int = 0


class RequestsInFlight:
    """The requests of a hub in each server, by number and by predicted tokens."""

    def __init__(self) -> None:
        self._uses: dict[str, _Use] = {}

    def sent(self, server: str, tokens: int, size: int = 0) -> None:
        """Count a request with its predicted length, 0 unknown, and the bytes of its context."""
        use = self._uses.setdefault(server, _Use())
        use.requests += 1
        use.tokens += tokens
        use.size += size

    def returned(self, server: str, tokens: int, size: int = 0, *, is_busy: bool = False) -> None:
        """End a request, with the same numbers as in ``sent``.

        Args:
            is_busy: the server had no room for it, so it takes no more than the others. Each answer
                makes a little more room, to notice when there is more.
        """
        use = self._uses[server]
        use.requests -= 1
        use.tokens -= tokens
        use.size -= size
        if is_busy:
            use.room = float(use.size)
        else:
            use.room += size * max(ROOM_GROWTH, 1.0 / (use.requests + 1))

    def has_room(self, server: str, size: int) -> bool:
        """Return whether a server is likely to take a request; one is always tried."""
        use = self._uses.get(server)
        return use is None or not use.requests or use.size + size <= use.room

    def requests(self, server: str) -> int:
        """Return how many requests of this hub are in a server."""
        use = self._uses.get(server)
        return 0 if use is None else use.requests

    def loads(
        self, serving: Sequence[wire.Presence], weights: Mapping[str, float]
    ) -> list[ServerLoad]:
        """Return the servers as ``choose`` compares them.

        A server has the requests that it reported, and those sent from here since. Requests whose
        length is not known here, as those of other hubs, count as typical ones.
        """
        speeds = [
            presence.speed / presence.slots
            for presence in serving
            if presence.speed > 0 and presence.slots
        ]
        per_slot = (
            sum(speeds) / len(speeds) if speeds else 1.0
        )  # for a server that has not worked yet
        requests = sum(use.requests for use in self._uses.values())
        tokens = 0
        if requests:
            tokens = sum(use.tokens for use in self._uses.values())
        return [
            self._load(presence, per_slot, tokens / max(requests, 1), weights.get(presence.id, 0.0))
            for presence in serving
        ]

    def _load(
        self, presence: wire.Presence, per_slot: float, typical: float, weight: float
    ) -> ServerLoad:
        use = self._uses.setdefault(presence.id, _Use())
        if use.presence is not presence:
            use.presence = presence
            use.requests_then = use.requests
        load = max(
            use.requests, presence.running + presence.waiting + use.requests - use.requests_then
        )
        work = float(load)
        if typical:
            work = load - use.requests + use.tokens / typical
        return ServerLoad(
            presence.id,
            presence.address,
            presence.policy_version,
            slots=presence.slots,
            load=load,
            speed=presence.speed or per_slot * max(presence.slots, 1),
            weight=weight,
            work=work,
            shares_prefixes=presence.engine in SHARING,
        )


@dataclass(eq=False, slots=True)
class OpenTurn:
    """A turn that was requested, with its predicted length and its limit."""

    episode: str
    started_at: float
    expected: int
    high: int
    max_tokens: int


class OpenEpisodes:
    """How many tokens the open episodes have, and how many more to expect of their turns.

    The hub sees an answer only when it is complete, so it supposes that a turn grows at the mean
    rate of earlier ones.
    """

    def __init__(self) -> None:
        self._rate = 0.0  # tokens per second of one turn
        self._turns: dict[str, set[OpenTurn]] = {}
        self._tokens: dict[str, int] = {}  # of finished turns

    def began(self, turn: OpenTurn) -> None:
        """Note that a turn was requested."""
        self._turns.setdefault(turn.episode, set()).add(turn)

    def ended(self, turn: OpenTurn, tokens: int, now: float) -> None:
        """Note that it is over, with this many tokens."""
        self._turns.get(turn.episode, set()).discard(turn)
        if tokens and turn.episode in self._turns:
            self._tokens[turn.episode] = self._tokens.get(turn.episode, 0) + tokens
        if tokens and (passed := now - turn.started_at) > 0:
            rate = tokens / passed
            self._rate += (rate - self._rate) * RATE_DECAY if self._rate else rate

    def forget(self, episode: str) -> None:
        """Note that an episode has ended."""
        self._turns.pop(episode, None)
        self._tokens.pop(episode, None)

    def left_s(self, episode: str, now: float) -> float:
        """Return for how many seconds its present turn is still expected to grow, 0 unknown."""
        lefts = [self._left(turn, now)[1] for turn in self._turns.get(episode, ())]
        if not self._rate:
            return 0.0
        return max(lefts, default=0) / self._rate

    def length(self, episode: str, now: float) -> int:
        """Return the tokens that an episode is expected to have if its present turn is its last."""
        present = sum(sum(self._left(turn, now)) for turn in self._turns.get(episode, ()))
        return self._tokens.get(episode, 0) + present

    def _left(self, turn: OpenTurn, now: float) -> tuple[int, int]:
        """Return the tokens that a turn has, and those still to come."""
        grown = min(round((now - turn.started_at) * self._rate), turn.max_tokens)
        return grown, remaining_tokens(turn.expected, turn.high, grown, turn.max_tokens - grown)[0]
