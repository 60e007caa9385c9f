"""The hub's side of generation: elsewhere after a failure, on from a partial output, aborted when
nobody waits.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from envhub_kit import domain, write_tokenizer

from broker.contract import wire
from broker.contract.lengths import remaining_tokens
from broker.errors import RequestFailed, WireError
from envhub.episodes.rerun import TicketReruns
from envhub.episodes.runners import EpisodeLimits, EpisodeRunners
from envhub.episodes.trial import trial
from envhub.servers.awake_clock import AwakeClock
from envhub.servers.generate import TurnGenerator
from envhub.servers.turn import TurnFailed, TurnRequest, mix, stirred
from envhub.workers.calls import EnvironmentCalls
from rlearner_text.tokenizer import Tokenizer

Answer = Callable[[wire.GenerateRequest], wire.GenerateReply | Awaitable[wire.GenerateReply]]


def presence(name: str, **kwargs: object) -> wire.Presence:
    values = {"state": "serving", "address": name, "slots": 8, "policy_version": 1, **kwargs}
    return wire.Presence(role="rollout", id=name, host="h", pid=1, **values)  # type: ignore[arg-type]


class Servers:
    def __init__(self, *presences: wire.Presence) -> None:
        self.presences = list(presences)
        self.news = asyncio.Event()

    def alive(self, policy: str) -> list[wire.Presence]:
        return [one for one in self.presences if one.policy == policy]

    def weights(self, policy: str) -> dict[str, float]:
        return {one.id: 1.0 for one in self.alive(policy)}

    async def changed(self, timeout_s: float) -> None:
        await asyncio.wait({asyncio.create_task(self.news.wait())}, timeout=timeout_s)


class Client:
    """Each server answers from a function."""

    def __init__(self, **servers: Answer) -> None:
        self.servers = servers
        self.asked: list[tuple[str, wire.GenerateRequest]] = []

    async def generate(
        self, address: str, request: wire.GenerateRequest, *, timeout_s: float
    ) -> wire.GenerateReply:
        self.asked.append((address, request))
        answer = self.servers[address](request)
        return answer if isinstance(answer, wire.GenerateReply) else await answer

    async def abort(self, address: str, request_id: str) -> None: ...
    async def forget(self, address: str) -> None: ...
    async def close(self) -> None: ...


def reply(
    request: wire.GenerateRequest,
    tokens: list[int],
    reason: str = "stop",
    *,
    version: int = 1,
    server: str = "a",
    error: str = "",
) -> wire.GenerateReply:
    return wire.GenerateReply(
        request_id=request.request_id,
        server=server,
        token_ids=wire.column(tokens, "<i4"),
        logprobs=wire.column([-1.0] * len(tokens), "<f4"),
        version_runs=wire.column([version, len(tokens)] if tokens else [], "<i4"),
        finish_reason=reason,  # type: ignore[arg-type]
        policy_version=version,
        error=error,
    )


def ask(**kwargs: object) -> TurnRequest:
    sampling = wire.SamplingParams(max_tokens=8, seed=5)
    fields = {
        "conversation_id": "c",
        "token_ids": [1, 2, 3],
        "sampling": sampling,
        "timeout_s": 5.0,
        **kwargs,
    }
    return TurnRequest(**fields)  # type: ignore[arg-type]


def generator(client: Client, *presences: wire.Presence) -> TurnGenerator:
    return TurnGenerator(client, Servers(*presences), name="hub", max_retries=2)


def fails(request: wire.GenerateRequest) -> wire.GenerateReply:
    raise RequestFailed("no answer")


async def test_one_answer_is_one_turn() -> None:
    client = Client(a=lambda request: reply(request, [7, 8]))
    sampled = await generator(client, presence("a")).turn(
        ask(min_version=4, expected_tokens=3, expected_high=7, priority=2, step=5)
    )
    assert (list(sampled.token_ids), list(sampled.logprobs), list(sampled.version_runs)) == (
        [7, 8],
        [-1.0, -1.0],
        [1, 2],
    )
    assert (sampled.finish_reason, sampled.server) == ("stop", "a")
    request = client.asked[0][1]
    assert request.token_ids.array().tolist() == [1, 2, 3]
    assert (request.min_version, request.expected_tokens, request.conversation_id) == (4, 3, "c")
    assert (request.expected_high, request.priority, request.step) == (7, 2, 5)
    assert 0 < request.deadline_s <= 5 / 3  # a third of the turn's time each, for two retries


async def test_a_failure_is_asked_elsewhere() -> None:
    client = Client(a=fails, b=lambda request: reply(request, [7], server="b"))
    asking = generator(client, presence("a"), presence("b", running=1))
    assert (await asking.turn(ask())).server == "b"
    assert [address for address, _ in client.asked] == ["a", "b"]
    assert asking.retries == 1


async def test_an_error_reply_is_a_failure_and_retries_are_bounded() -> None:
    client = Client(a=lambda request: reply(request, [], "error", error="out of memory"))
    with pytest.raises(TurnFailed, match="after 3 failures: a: out of memory"):
        await generator(client, presence("a")).turn(ask())
    assert len(client.asked) == 3
    assert len({request.request_id for _, request in client.asked}) == 3


@pytest.mark.parametrize("reason", ["abort", "deadline"])
async def test_a_partial_output_is_continued_not_thrown_away(reason: str) -> None:
    def first(request: wire.GenerateRequest) -> wire.GenerateReply:
        client.servers["a"] = client.servers["b"]
        return reply(request, [7, 8], reason, version=1)

    client = Client(a=first, b=lambda request: reply(request, [9], version=2, server="b"))
    sampled = await generator(client, presence("a"), presence("b", running=1)).turn(ask())
    assert (list(sampled.token_ids), list(sampled.version_runs), sampled.finish_reason) == (
        [7, 8, 9],
        [1, 2, 2, 1],
        "stop",
    )
    again = client.asked[1][1]
    assert again.token_ids.array().tolist() == [1, 2, 3, 7, 8]
    assert again.sampling.max_tokens == 6
    assert again.sampling.seed == mix(5, 2)
    assert client.asked[1][0] == ("b" if reason == "abort" else "a")


async def test_a_continued_request_expects_what_is_still_to_come() -> None:
    def first(request: wire.GenerateRequest) -> wire.GenerateReply:
        client.servers["a"] = lambda request: reply(request, [9])
        return reply(request, [7, 8], "deadline")

    client = Client(a=first)
    await generator(client, presence("a")).turn(
        ask(expected_tokens=4, expected_high=8, priority=1, step=2)
    )
    asked = [
        (one.expected_tokens, one.expected_high, one.priority, one.step) for _, one in client.asked
    ]
    assert asked == [(4, 8, 1, 2), (*remaining_tokens(4, 8, 2, 6), 1, 2)]
    assert asked[1][:2] == (2, 6)


@pytest.mark.parametrize("reason", ["abort", "deadline"])
async def test_an_output_that_cannot_be_continued_starts_over(reason: str) -> None:
    def first(request: wire.GenerateRequest) -> wire.GenerateReply:
        client.servers["a"] = client.servers["b"]
        return reply(request, [7, 8], reason, version=1)

    client = Client(a=first, b=lambda request: reply(request, [9], version=2, server="b"))
    sampling = wire.SamplingParams(max_tokens=8, seed=5, stop=["ab"])  # 8 may be "a", and 9 "b"
    sampled = await generator(client, presence("a"), presence("b", running=1)).turn(
        ask(sampling=sampling)
    )
    assert (list(sampled.token_ids), list(sampled.version_runs), list(sampled.logprobs)) == (
        [9],
        [2, 1],
        [-1.0],
    )
    (_, before), (_, again) = client.asked
    assert again.token_ids.array().tolist() == [1, 2, 3]
    assert again.sampling == sampling
    assert before.deadline_s <= 5 / 3
    # what did not end within the time of an attempt would not do so again
    assert (again.deadline_s > 4) is (reason == "deadline")


@pytest.mark.parametrize(
    ("engine", "tokens", "one"),
    [("vllm", 300, True), ("vllm", 20, False), ("hf", 300, True), ("openai", 300, False)],
)
async def test_a_groups_prompts_go_to_one_server_while_it_has_slots(
    engine: str, tokens: int, one: bool
) -> None:
    client = Client(**{name: lambda request: reply(request, [9]) for name in "abcd"})
    asking = generator(client, *(presence(name, engine=engine) for name in "abcd"))
    for episode in range(20):
        await asking.turn(ask(token_ids=[1] * tokens, episode=f"hub.7.{episode}.0"))
    assert (len({address for address, _ in client.asked}) == 1) is one


@pytest.mark.parametrize("leaves", [True, False])
async def test_when_a_groups_server_leaves_or_fails_its_prompts_go_to_another_one(
    leaves: bool,
) -> None:
    client = Client(**{name: lambda request: reply(request, [9]) for name in "abcd"})
    directory = Servers(*(presence(name, engine="vllm") for name in "abcd"))
    asking = TurnGenerator(client, directory, name="hub", max_retries=2)

    async def play(episodes: range) -> list[str]:
        before = len(client.asked)
        for episode in episodes:
            await asking.turn(ask(token_ids=[1] * 300, episode=f"hub.7.{episode}.0"))
        return [address for address, _ in client.asked[before:]]

    (home,) = set(await play(range(5)))
    if leaves:
        directory.presences = [one for one in directory.presences if one.id != home]
        (after,) = set(await play(range(20)))
    else:
        client.servers[home] = fails
        first, after, *others = await play(range(20))
        assert (first, set(others)) == (home, {after})
    assert after != home


async def test_an_interrupted_answer_is_not_its_groups_prompt() -> None:
    def interrupted(request: wire.GenerateRequest) -> wire.GenerateReply:
        return reply(request, [7], "abort" if len(request.token_ids.array()) == 300 else "stop")

    client = Client(a=interrupted, b=interrupted)
    asking = generator(client, presence("a", engine="vllm"), presence("b", engine="vllm"))
    await asking.turn(ask(token_ids=[1] * 300, episode="hub.7.0.0"))
    (home, _), (other, _) = client.asked
    assert other != home
    await asking.turn(ask(token_ids=[1] * 301, episode="hub.7.1.0"))
    assert client.asked[-1][0] == home


async def test_a_turn_is_interrupted_twice_at_most() -> None:
    def interrupted(request: wire.GenerateRequest) -> wire.GenerateReply:
        return reply(request, [7], "stop" if request.priority else "abort")

    client = Client(a=interrupted)
    sampled = await generator(client, presence("a")).turn(ask(step=3))
    assert [request.priority for _, request in client.asked] == [0, 0, 1]
    assert (list(sampled.token_ids), sampled.finish_reason) == ([7, 7, 7], "stop")


async def test_a_partial_output_of_full_length_is_complete() -> None:
    client = Client(a=lambda request: reply(request, list(range(8)), "abort"))
    sampled = await generator(client, presence("a")).turn(ask())
    assert (len(sampled.token_ids), sampled.finish_reason, len(client.asked)) == (8, "length", 1)


async def test_more_tokens_than_asked_for_are_refused() -> None:
    client = Client(a=lambda request: reply(request, list(range(9))))
    with pytest.raises(TurnFailed, match="the server returned 9 tokens, at most 8 were requested"):
        await generator(client, presence("a")).turn(ask())


async def test_only_serving_servers_of_the_policy_are_asked_and_waited_for() -> None:
    client = Client(c=lambda request: reply(request, [7], server="c"))
    servers = Servers(presence("a", policy="random"), presence("b", state="draining"))
    asking = TurnGenerator(client, servers, name="hub", max_retries=2)
    turn = asyncio.create_task(asking.turn(ask()))
    await asyncio.sleep(0.05)
    assert not client.asked
    servers.presences.append(presence("c"))
    servers.news.set()
    assert (await turn).server == "c"
    with pytest.raises(TurnFailed, match="there is no rollout server"):
        await asking.turn(ask(policy="nobody", timeout_s=0.05))


async def test_load_counts_what_was_sent_since_presence_spoke() -> None:
    release = asyncio.Event()

    async def slow(request: wire.GenerateRequest) -> wire.GenerateReply:
        await release.wait()
        return reply(request, [7])

    client = Client(a=slow)
    asking = generator(client, presence("a", running=3, waiting=1))
    assert asking.servers("actor")[0].load == 4
    turns = [asyncio.create_task(asking.turn(ask())) for _ in range(2)]
    await asyncio.sleep(0)
    assert asking.servers("actor")[0].load == 6
    asking._followed.presences = [presence("a", running=5)]  # type: ignore[attr-defined]
    assert asking.servers("actor")[0].load == 5
    release.set()
    await asyncio.gather(*turns)
    assert asking.servers("actor")[0].load == 3


async def test_a_request_that_cannot_be_sent_fails_its_turn() -> None:
    def refuses(request: wire.GenerateRequest) -> wire.GenerateReply:
        raise WireError("too large")

    client = Client(a=refuses)
    with pytest.raises(TurnFailed, match="the request is malformed: too large"):
        await generator(client, presence("a")).turn(ask())
    assert len(client.asked) == 1


def test_seeds_are_spread_and_stable() -> None:
    assert mix(0) == 0xE220A8397B1D  # splitmix64's first output from 0, without its low 16 bits
    assert (
        len(
            {
                mix(seed, episode, at)
                for seed in range(10)
                for episode in range(10)
                for at in range(10)
            }
        )
        == 1000
    )
    assert all(0 <= mix(seed) < 2**48 for seed in range(100))
    assert mix(1, 2, 3) == stirred(stirred(0, 1, 2), 3) >> 16


async def test_time_in_which_the_servers_sleep_is_no_time_of_a_turn() -> None:
    """Requests that wait in a server that sleeps come back empty at their deadlines, and are sent
    again.
    """
    clock = AwakeClock()

    async def waits(request: wire.GenerateRequest) -> wire.GenerateReply:
        if len(client.asked) < 5:
            await asyncio.sleep(request.deadline_s)
            return reply(request, [], "deadline")
        clock.note(False)
        return reply(request, [7])

    client = Client(a=waits)
    followed = Servers(presence("a", asleep=True))
    asking = TurnGenerator(client, followed, name="hub", max_retries=2, clock=clock.now)
    clock.note(True)
    assert list((await asking.turn(ask(timeout_s=0.3))).token_ids) == [7]
    assert len(client.asked) == 5  # each took a tenth of a second, 0.4 s in all
    assert asking.retries == 0
    client.asked.clear()
    with pytest.raises(TurnFailed, match="deadline before the turn was complete"):
        await asking.turn(ask(timeout_s=0.3))  # awake


@pytest.mark.parametrize(
    ("trouble", "max_turns", "hangs"), [("", 2, False), ("raise in step", 2, False), ("", 3, True)]
)
async def test_trials_and_reruns_leave_no_open_episode(
    trouble: str, max_turns: int, hangs: bool, tmp_path: Path
) -> None:
    """However they end: well, with an error of the environment, or cancelled or late in their
    second turn.
    """
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path))

    async def answers(request: wire.GenerateRequest) -> wire.GenerateReply:
        if hangs and len(client.asked) > 1:
            await asyncio.Event().wait()
        return reply(request, tokenizer.encode("R"))

    client = Client(a=answers)
    asking = generator(client, presence("a"))
    crew = EpisodeRunners(tokenizer, asking, EnvironmentCalls(5.0), EpisodeLimits(20.0, 10.0))
    count = domain(
        "envhub_kit:Count", max_turns=max_turns, env_args={"until": 9, "trouble": trouble}
    )

    async def left_by(work: Any) -> dict[str, int]:
        client.asked.clear()
        running = asyncio.ensure_future(work)
        if hangs:
            async with asyncio.timeout(5):
                while len(client.asked) < 2:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            assert asking.open.length(client.asked[0][1].conversation_id, time.monotonic()) > 0
            running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        names = {request.conversation_id for _, request in client.asked}
        return {name: asking.open.length(name, time.monotonic()) for name in names}

    assert await left_by(trial(crew, count, "hub.trial1.d", 1)) == {"hub.trial1.d": 0}
    member: Any = SimpleNamespace(id="hub", stop=SimpleNamespace(asked=asyncio.Event()))
    ticket = wire.Ticket(
        number=7, domain="d", task_index=0, seed=1, min_version=0, max_staleness=1, group_size=1, min_group_size=1,
        deadline_s=9.0,
    )  # fmt: skip
    ((name, length),) = (
        await left_by(TicketReruns(member, crew, {"d": count}).answer(ticket))
    ).items()
    assert (name.startswith("hub.rerun1."), length) == (True, 0)
    await crew.close()
