"""The attempts at a turn, under any order of replies, failures, refusals, waits and new weights."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.contract import wire
from envhub.servers import turn_attempts
from envhub.servers.choose import ServerLoad
from envhub.servers.turn import TurnRequest, mix
from envhub.servers.turn_attempts import (
    EMPTY_PAUSE_S,
    INTERRUPTIONS_MOST,
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

NAMES = "abcd"
FULL_VIEWS = 4  # a fleet that is full for ever is waited for for ever
OUTCOMES = ["stop", "length", "abort", "deadline", "busy", "busy", "error", "excess", "silence"]


def server(name: str, version: int = 0, **load: Any) -> ServerLoad:
    return ServerLoad(name, f"tcp://{name}", version, slots=4, load=0, **load)


def reply(
    tokens: list[int], reason: str, runs: list[int] | None = None, error: str = ""
) -> wire.GenerateReply:
    return wire.GenerateReply(
        request_id="",
        server="it",
        token_ids=wire.column(tokens, "<i4"),
        logprobs=wire.column([-float(token) for token in tokens], "<f4"),
        version_runs=wire.column(
            ([0, len(tokens)] if tokens else []) if runs is None else runs, "<i4"
        ),
        finish_reason=reason,  # type: ignore[arg-type]
        policy_version=0,
        error=error,
    )


class Playthrough:
    """One turn, whose decisions are performed with drawn outcomes and checked one by one.

    Attributes:
        kept: tokens that the turn must have: of all replies, or since it last started over.
    """

    def __init__(self, data: st.DataObject) -> None:
        self.draw = data.draw
        self.now = self.draw(st.floats(0, 1e6), label="now")
        self.resumable = self.draw(st.booleans(), label="resumable")
        self.max_tokens = self.draw(st.integers(1, 12), label="max_tokens")
        self.max_retries = self.draw(st.integers(0, 3), label="max_retries")
        self.ask = TurnRequest(
            conversation_id="c",
            token_ids=[1] * self.draw(st.sampled_from([1, 3, 300]), label="prompt"),
            sampling=wire.SamplingParams(
                max_tokens=self.max_tokens, seed=5, stop=[] if self.resumable else ["x"]
            ),
            episode="hub.7.0.0",
            sticky=self.draw(st.sampled_from(["", "a"]), label="sticky"),
            timeout_s=self.draw(st.sampled_from([0.05, 0.3]), label="timeout_s"),
        )
        self.until = self.now + self.ask.timeout_s
        self.attempts = TurnAttempts(self.ask, self.max_retries, self.now)
        self.rng = random.Random(self.draw(st.integers(0, 9), label="seed"))
        self.kept: list[int] = []
        self.runs: list[int] = []
        self.next_token = 100
        self.version = 0
        self.lags = {name: self.draw(st.integers(0, 2), label=f"lag of {name}") for name in NAMES}
        self.refused: set[str] = set()
        self.avoided = ""
        self.sticky = self.ask.sticky
        self.interruptions = 0
        self.full_views = 0
        self.asked = self.useless = 0  # requests; those since time passed that brought no token
        self.view: list[str] = []
        self.roomy: list[str] = []

    def play(self) -> FinishTurn | GiveUp:
        decision: Decision = self.attempts.resume(self.now)
        for _ in range(150):
            match decision:
                case FindServers():
                    assert self.now < self.until, "went on although its time is over"
                    decision = self.find()
                case AskServer():
                    decision = self.request(decision)
                case AwaitRoom(num_servers):
                    assert num_servers == len(self.view) > 0
                    assert not self.roomy
                    waited_s = self.draw(st.floats(0, 5), label="waited_s")
                    self.pass_time(waited_s)
                    self.until += waited_s
                    self.refused.clear()
                    decision = self.attempts.find_room(waited_s, self.now)
                case AwaitServers(timeout_s):
                    assert not self.view
                    assert 0 < timeout_s <= self.until - self.now + 1e-6
                    self.pass_time(self.draw(st.floats(0.2, 1)) * timeout_s + 1e-3)
                    decision = self.attempts.resume(self.now)
                case PauseTurn(seconds):
                    assert seconds == EMPTY_PAUSE_S
                    self.pass_time(seconds)
                    decision = self.attempts.resume(self.now)
                case FinishTurn() | GiveUp():
                    return decision
        raise AssertionError("the turn never ended")

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.useless = 0

    def find(self) -> Decision:
        """Servers come, go, get new weights and fill up; their versions never decrease."""
        self.version += self.draw(st.integers(0, 2), label="new versions")
        self.view = self.draw(st.lists(st.sampled_from(NAMES), unique=True), label="servers")
        full = set(self.draw(st.sets(st.sampled_from(NAMES)), label="full"))
        self.full_views += bool(self.view and full >= set(self.view))
        if self.full_views > FULL_VIEWS:
            full = set()
        self.roomy = [name for name in self.view if name not in full | self.refused]
        near = self.draw(st.sampled_from(["", *NAMES]), label="near")
        servers = [server(name, self.version - self.lags[name]) for name in self.view]
        decision = self.attempts.choose_server(
            servers, lambda name, size: name not in full, self.rng, near=near
        )
        assert isinstance(decision, AskServer) is bool(self.roomy)
        if isinstance(decision, AskServer):
            has_home = near in self.view and near != self.avoided
            is_first = len(self.ask.token_ids) == 300 and not self.sticky
            assert decision.is_group_home is (is_first and not has_home)
        return decision

    def request(self, attempt: AskServer) -> Decision:
        name = attempt.server.id
        assert name in self.roomy, "asked a server that is full, or refused and had no time since"
        assert name != self.avoided or self.roomy == [name], "asked again where it just failed"
        request = attempt.request
        assert request.token_ids.array().tolist() == [*self.ask.token_ids, *self.kept]
        room = self.max_tokens - len(self.kept)
        assert request.sampling.max_tokens == room > 0
        assert request.sampling.seed == (mix(5, len(self.kept)) if self.kept else 5)
        assert 0 < request.deadline_s <= self.until - self.now + 1e-6
        assert request.priority == int(self.interruptions >= INTERRUPTIONS_MOST)
        self.asked += 1
        self.useless += 1
        assert self.useless <= len(NAMES) + self.max_retries + 1, "asks in a loop"
        self.now += self.draw(st.sampled_from([0.0, 0.5, 1.0])) * request.deadline_s
        return self.answer(name, self.draw(st.sampled_from(OUTCOMES), label="outcome"), room)

    def answer(self, name: str, outcome: str, room: int) -> Decision:
        failures = self.attempts.failures
        if outcome in ("silence", "error", "excess"):
            self.avoided = name
            if outcome == "silence":
                decision: Decision = self.attempts.fail(name, "no answer", self.now)
            else:
                tokens = [7] * (room + 1 if outcome == "excess" else 0)
                reason = "stop" if outcome == "excess" else "error"
                decision = self.attempts.receive(name, reply(tokens, reason, error="x"), self.now)
            assert self.attempts.failures == failures + 1
            return decision
        if outcome == "busy":
            self.refused.add(name)
            decision = self.attempts.receive(name, reply([], "busy", error="full"), self.now)
            assert (self.attempts.failures, list(self.attempts.turn.token_ids)) == (
                failures,
                self.kept,
            )
            return decision
        count = self.draw(st.integers(0, room), label="count")
        tokens = list(range(self.next_token, self.next_token + count))
        self.next_token += count
        version = self.version - self.lags[name]
        split = self.draw(st.integers(0, count), label="before new weights")
        runs = [
            *([version, split] * bool(split)),
            *([version + 1, count - split] * (split < count)),
        ]
        self.version = max(self.version, version + 1 + self.lags[name])
        is_whole = outcome in ("stop", "length")
        if is_whole or self.resumable:
            self.kept += tokens
            self.runs += runs
            self.useless *= not tokens
        if not is_whole:
            self.sticky = name
            self.avoided = name if outcome == "abort" else ""
            self.interruptions += outcome == "abort"
        decision = self.attempts.receive(name, reply(tokens, outcome, runs), self.now)
        assert self.attempts.failures == failures
        full = len(self.kept) == self.max_tokens
        assert isinstance(decision, FinishTurn) is (is_whole or full)
        if not isinstance(decision, FinishTurn) and not (tokens and self.resumable):
            assert decision == PauseTurn(EMPTY_PAUSE_S)
        return decision


@given(st.data())
@settings(max_examples=300)
def test_any_order_of_events_ends_and_loses_or_repeats_no_token(data: st.DataObject) -> None:
    turn = Playthrough(data)
    end = turn.play()
    assert turn.attempts.failures <= turn.max_retries + 1
    if isinstance(end, GiveUp):
        assert turn.now >= turn.until or turn.attempts.failures == turn.max_retries + 1
        return
    sampled = end.turn
    assert list(sampled.token_ids) == turn.kept
    assert len(turn.kept) <= turn.max_tokens
    assert list(sampled.logprobs) == [-float(token) for token in turn.kept]
    assert list(sampled.version_runs) == turn.runs
    assert sum(sampled.version_runs[1::2]) == len(turn.kept)
    if len(set(turn.lags.values())) == 1:  # else the next server may be behind
        assert sorted(sampled.version_runs[::2]) == list(sampled.version_runs[::2])
    assert sampled.finish_reason in ("stop", "length")


def attempts(**kwargs: Any) -> TurnAttempts:
    sampling = wire.SamplingParams(max_tokens=8)
    ask = TurnRequest("c", [1, 2], sampling, **{"timeout_s": 9.0, **kwargs})
    return TurnAttempts(ask, max_retries=2, now=100.0)


def has_room(name: str, size: int) -> bool:
    return True


def choose(machine: TurnAttempts, *names: str) -> Decision:
    return machine.choose_server([server(name) for name in names], has_room, random.Random(0))


def test_machine_knows_no_clock_and_no_loop() -> None:
    assert not {"asyncio", "time", "logging"} & vars(turn_attempts).keys()


def test_retries_are_bounded() -> None:
    machine = attempts()
    assert machine.resume(100.0) == FindServers()
    assert machine.fail("a", "no answer", 100.0) == FindServers()
    assert machine.receive("b", reply([], "error", error="out of memory"), 100.0) == FindServers()
    assert machine.fail("a", "no answer", 100.0) == GiveUp(
        "no complete turn after 3 failures: a: no answer (policy actor, within 9 s)"
    )


def test_each_attempt_has_its_share_of_the_time() -> None:
    machine = attempts()
    for now, deadline_s in ((100.0, 3.0), (107.0, 2.0)):
        machine.resume(now)
        decision = choose(machine, "a")
        assert isinstance(decision, AskServer)
        assert decision.request.deadline_s == pytest.approx(deadline_s)
    assert isinstance(machine.resume(109.0), GiveUp)


def test_refused_servers_are_asked_again_when_one_may_have_room() -> None:
    machine = attempts()
    machine.resume(100.0)
    assert machine.receive("a", reply([], "busy"), 100.0) == FindServers()
    decision = choose(machine, "a", "b")
    assert isinstance(decision, AskServer)
    assert decision.server.id == "b"
    assert machine.receive("b", reply([], "busy"), 100.0) == FindServers()
    assert choose(machine, "a", "b") == AwaitRoom(2)
    # the wait is no part of the turn's 9 seconds
    assert machine.find_room(50.0, 150.0) == FindServers()
    assert isinstance(choose(machine, "a"), AskServer)
    assert machine.resume(158.9) == FindServers()
    assert isinstance(machine.resume(159.0), GiveUp)


def test_wait_for_servers_ends_with_the_turn() -> None:
    machine = attempts()
    machine.resume(100.0)
    assert choose(machine) == AwaitServers(1.0)
    machine.resume(108.75)
    assert choose(machine) == AwaitServers(0.25)


def test_interrupted_turn_goes_on_where_its_tokens_are_unless_aborted() -> None:
    for reason, home in (("deadline", "b"), ("abort", "a")):
        machine = attempts()
        machine.resume(100.0)
        assert machine.receive("b", reply([4], reason), 101.0) == FindServers()
        decision = choose(machine, "a", "b")
        assert isinstance(decision, AskServer)
        assert decision.server.id == home
        assert decision.request.token_ids.array().tolist() == [1, 2, 4]
