"""The environment hub over a real nats-server and ZeroMQ: tickets in, groups or closings out,
whatever happens.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from envhub_world import KIT, LAKE, World
from recorded_frames import read_frames
from source_lines import line_of
from waits import until

from broker.contract import codec, wire
from broker.contract.streams import DEAD, EPISODES, EVALS, EVALTICKETS, SAMPLES, TICKETS
from broker.errors import ConfigError, UserError
from broker.jetstream.bus import Bus
from broker.jetstream.core_messages import watch_metrics
from broker.runtime.presence import Roster
from broker.runtime.process import Stop
from envhub.service import serve


@pytest.fixture
async def world(bus: Bus, broker_url: str, tmp_path: Path) -> AsyncIterator[World]:
    made = World(bus, broker_url, tmp_path)
    yield made
    await made.close()


def count(**env_args: Any) -> dict[str, Any]:
    return {"env": f"{KIT}:Count", "env_args": env_args, "max_turns": 5, "group_size": 1}


async def test_tickets_become_groups_in_the_log(world: World) -> None:
    await world.publish_spec({"lake": LAKE})
    server = await world.server(
        script=lambda request, context: "RRDDDR"[context.count("<|im_assistant|>") - 1], version=4
    )
    numbers = [await world.ticket(group_size=3) for _ in range(4)]
    async with world.hub("--n", "8", "--id", "hub1"):
        groups = await world.groups(4)
        await world.settled()
    assert sorted(groups) == numbers
    for number, group in groups.items():
        assert (group.domain, group.task_index, group.hub, group.deliveries, group.pools) == (
            "lake",
            number - 1,
            "hub1",
            1,
            [],
        )
        assert [one.episode for one in group.trajectories] == [0, 1, 2]
        assert group.generate_s > 0
        assert group.env_step_s > 0
        assert group.frames == []
        for one in group.trajectories:
            assert one.version_runs.array().tolist() == [4, 2 * len(one.turns)]
            assert {turn.server for turn in one.turns} == {"s1"}
            assert one.reward == float(one.success)
            assert one.loss_mask.array().sum() == 2 * len(one.turns)
    assert {request.sampling.max_tokens for request in server.asked} == {4}


async def test_greedy_episodes_come_last_and_are_marked(world: World) -> None:
    await world.publish_spec({"lake": LAKE})
    server = await world.server(
        script=lambda request, context: "RRDDDR"[context.count("<|im_assistant|>") - 1], version=4
    )
    number = await world.ticket(group_size=3, min_group_size=3, num_greedy=1)
    async with world.hub("--n", "8"):
        groups = await world.groups(1)
        await world.settled()
    assert [one.greedy for one in groups[number].trajectories] == [False, False, True]
    asked = [request.sampling.temperature for request in server.asked]
    assert {t for t in asked if t} == {1.0}
    assert asked.count(0.0) == len(groups[number].trajectories[2].turns)


async def test_a_group_with_redundant_episodes_does_not_wait_for_the_slowest(world: World) -> None:
    await world.publish_spec({"lake": LAKE})

    async def slow() -> str:
        await asyncio.sleep(30)
        return "R"

    server = await world.server(
        script=lambda request, _: slow() if ".1." in request.conversation_id else "R"
    )
    number = await world.ticket(group_size=4, min_group_size=3, num_redundant=1)
    async with world.hub("--n", "8"):
        groups = await world.groups(1)
        await world.settled()
    assert [one.episode for one in groups[number].trajectories] == [0, 2, 3]
    (slowest,) = [
        request.request_id for request in server.asked if ".1." in request.conversation_id
    ]
    assert server.aborted == [slowest]


async def test_groups_with_rewards_go_to_their_first_pool(world: World) -> None:
    rewards = [
        {"name": "a", "pool": "gpu"},
        {"name": "b", "pool": "default"},
        {"name": "c", "pool": "gpu"},
    ]
    await world.publish_spec({"lake": {**LAKE, "rewards": rewards}})
    await world.server()
    number = await world.ticket()
    async with world.hub():
        queue = await world.bus.work_queue(EPISODES, "gpu")
        (delivery,) = await queue.fetch(1, 15)
        await world.settled()
    assert isinstance(delivery.message, wire.Group)
    assert (delivery.message.ticket, delivery.ticket, delivery.message.pools) == (
        number,
        number,
        ["gpu", "default"],
    )
    await delivery.ack()


async def test_evaluations_are_held_out_and_recorded_and_asked_of_their_policy_only(
    world: World,
) -> None:
    await world.publish_spec({"lake": LAKE})
    actor, baseline = (
        await world.server("s1"),
        await world.server("s2", lambda *_: "D", policy="random"),
    )
    await world.eval_ticket(eval_step=7, temperature=0.0)
    await world.eval_ticket(eval_step=7, policy="random")
    async with world.hub():
        groups = await world.groups(2, EVALS)
        await world.settled(EVALTICKETS)
    assert [(groups[n].eval_step, groups[n].policy, groups[n].task_index) for n in (1, 2)] == [
        (7, "actor", 0),
        (7, "random", 1),
    ]
    assert {turn.server for one in groups[1].trajectories for turn in one.turns} == {"s1"}
    assert {turn.server for one in groups[2].trajectories for turn in one.turns} == {"s2"}
    assert {request.sampling.temperature for request in actor.asked} == {0.0}
    assert {request.sampling.temperature for request in baseline.asked} == {1.0}
    recorded = read_frames(groups[1].frames)
    assert (recorded.split, recorded.task_index, recorded.seed) == ("eval", 0, 1)
    assert recorded.actions == ["R"] * len(groups[1].trajectories[0].turns)
    assert await world.bus.last_seq(SAMPLES) == 0


async def test_what_is_no_ticket_goes_to_the_dead_and_work_goes_on(world: World) -> None:
    await world.publish_spec({"lake": LAKE})
    await world.server()
    await world.raw(TICKETS, b"no ticket", ticket=1)
    # no header either: its number is its sequence
    await world.raw(TICKETS, codec.encode(wire.DesiredState(state="running")))
    other = wire.Ticket(
        number=3,
        domain="sea",
        task_index=0,
        seed=0,
        min_version=0,
        max_staleness=0,
        group_size=1,
        min_group_size=1,
        deadline_s=1,
    )
    await world.raw(TICKETS, codec.encode(other), ticket=3)
    await world.raw(EVALTICKETS, b"\xc1", ticket=5)
    await world.ticket()
    async with world.hub():
        records = {record.ticket: record for record in await world.records(4)}
        letters = {
            (letter.stream, letter.sequence): letter for letter in await world.records(4, DEAD)
        }
        (closed_eval,) = await world.records(1, EVALS)
        await world.settled()
        await world.settled(EVALTICKETS)
    assert [type(records[n]).__name__ for n in (1, 2, 3, 4)] == [
        "Closed",
        "Closed",
        "Closed",
        "Group",
    ]
    assert {records[n].reason for n in (1, 2, 3)} == {"malformed"}
    assert records[3].detail == "a ticket of another domain in the queue of lake"
    assert (closed_eval.ticket, closed_eval.reason) == (5, "malformed")
    assert letters["tickets", 1].data == b"no ticket"
    assert (letters["tickets", 2].ticket, letters["evaltickets", 1].ticket) == (2, 5)


async def test_tickets_of_a_hub_that_is_killed_are_redelivered(world: World) -> None:
    await world.publish_spec({"lake": LAKE})
    holding = await world.server("s1", lambda *_: asyncio.Event().wait())  # type: ignore[arg-type,return-value]
    numbers = [await world.ticket() for _ in range(3)]
    child = world.spawn("--n", "64", "--id", "killed")
    await until(lambda: len(holding.asked) == 6)
    child.send_signal(signal.SIGKILL)
    child.wait()
    holding.script = lambda *_: "R"
    async with world.hub("--id", "heir"):
        groups = await world.groups(3)
        await world.settled()
    assert sorted(groups) == numbers
    assert {(group.hub, group.deliveries) for group in groups.values()} == {("heir", 2)}
    assert await world.bus.last_seq(SAMPLES) == 3


async def test_a_drain_finishes_what_runs_and_takes_nothing_more(world: World) -> None:
    await world.publish_spec({"lake": LAKE})
    go = asyncio.Event()

    async def slowly() -> str:
        await go.wait()
        return "R"

    server = await world.server("s1", lambda *_: slowly())
    first = await world.ticket()
    child = world.spawn("--n", "2", "--id", "drained")
    await until(lambda: len(server.asked) == 2)
    second = await world.ticket()
    child.send_signal(signal.SIGTERM)
    roster = Roster(world.bus)
    await roster.start()
    await until(lambda: [one.state for one in roster.alive("envhub")] == ["draining"])
    go.set()
    assert await asyncio.to_thread(child.wait, 100) == 0
    assert sorted(await world.groups(1)) == [first]
    assert await world.bus.depth(TICKETS) == {"lake": 1}
    await until(lambda: not roster.alive("envhub"))
    await roster.close()
    async with world.hub():
        assert sorted(await world.groups(2)) == [first, second]


async def test_a_drain_that_takes_too_long_hands_back(world: World) -> None:
    await world.publish_spec({"lake": LAKE}, sections={"envhub": {"drain_timeout_s": 1.5}})
    holding = await world.server("s1", lambda *_: asyncio.Event().wait())  # type: ignore[arg-type,return-value]
    await world.ticket()
    child = world.spawn("--id", "drained")
    await until(lambda: len(holding.asked) == 2)
    child.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(child.wait, 100) == 0
    await until(lambda: len(holding.aborted) == 2)
    queue = await world.bus.work_queue(TICKETS, "lake")
    started = time.monotonic()
    (delivery,) = await queue.fetch(1, 10)
    assert time.monotonic() - started < 2.8, "not handed back, only redelivered"
    assert delivery.num_delivered == 2
    await delivery.ack()
    assert await world.bus.last_seq(SAMPLES) == 0


async def test_a_drain_without_any_server_hands_back_at_once(world: World) -> None:
    await world.publish_spec({"lake": LAKE}, sections={"envhub": {"drain_timeout_s": 60}})
    holding = await world.server("s1", lambda *_: asyncio.Event().wait())  # type: ignore[arg-type,return-value]
    await world.ticket()
    child = world.spawn()
    await until(lambda: len(holding.asked) == 2)
    await holding.close()
    child.send_signal(signal.SIGTERM)
    started = time.monotonic()
    assert await asyncio.to_thread(child.wait, 100) == 0
    assert time.monotonic() - started < 40, "waited for episodes that no server could continue"
    (delivery,) = await (await world.bus.work_queue(TICKETS, "lake")).fetch(1, 10)
    assert delivery.num_delivered == 2
    await delivery.ack()


async def test_a_run_that_is_stopped_ends_the_hub_at_once(world: World) -> None:
    await world.publish_spec({"lake": LAKE}, sections={"envhub": {"drain_timeout_s": 60}})
    holding = await world.server("s1", lambda *_: asyncio.Event().wait())  # type: ignore[arg-type,return-value]
    await world.ticket()
    child = world.spawn()
    await until(lambda: len(holding.asked) == 2)
    from broker.contract.streams import CONTROL

    await world.bus.key_value(CONTROL).put(world.bus.run, wire.DesiredState(state="stopped"))
    assert await asyncio.to_thread(child.wait, 100) == 0


async def test_bad_environments_cost_only_their_own_tickets(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    domains = {
        "hangs": count(trouble="hang in step", seconds=30),
        "raises": count(trouble="raise in reset"),
        "lake": LAKE,
    }
    await world.publish_spec(
        domains, sections={"envhub": {"step_timeout_s": 1.0, "max_retries": 1}}
    )
    await world.server()
    for domain in ("hangs", "raises"):
        await world.ticket(domain, group_size=1)
    for _ in range(3):
        await world.ticket()
    async with world.hub("--n", "4"):
        records = {record.ticket: record for record in await world.records(5)}
    assert (records[1].reason, records[1].detail) == (
        "env_error",
        "episode 0, attempt 2: step did not return within 1 s",
    )
    line = line_of("envhub_kit.py", "raise ValueError(")
    broken = f"ValueError: broken in reset (envhub_kit.py:{line} in _trouble)"
    assert (records[2].reason, records[2].detail) == (
        "env_error",
        f"episode 0, attempt 2: reset raised {broken}",
    )
    assert all(isinstance(records[n], wire.Group) for n in (3, 4, 5))
    failures = [
        record
        for record in caplog.records
        if f"reset raised {broken}" in record.getMessage() and "failed" in record.getMessage()
    ]
    ends = [record.getMessage().rpartition("; ")[2] for record in failures]
    again, back = (
        "the episode starts again",
        "its ticket goes back to the queue and will be played again",
    )
    # nothing else of the domain shows whether this host is to blame
    assert ends[:-1] == [again, back, again, back, again]
    # each only once
    assert [vars(record).get("traceback", "").count("Traceback") for record in failures] == [
        1,
        0,
        0,
        0,
        0,
        0,
    ]


async def test_a_hub_with_fewer_slots_than_queues_hands_nothing_back(world: World) -> None:
    await world.publish_spec({name: LAKE for name in "abcd"})
    await world.server()
    for number in range(12):
        await world.ticket("abcd"[number % 4])
    async with world.hub("--n", "2"):
        groups = await world.groups(12)
        await world.settled()
    assert {ticket: group.deliveries for ticket, group in groups.items()} == dict.fromkeys(
        range(1, 13), 1
    )


async def test_a_server_that_goes_is_replaced_and_costs_nothing(world: World) -> None:
    await world.publish_spec({"lake": LAKE})
    holding = await world.server("s1", lambda *_: asyncio.Event().wait())  # type: ignore[arg-type,return-value]
    await world.ticket()
    async with world.hub():
        await until(lambda: len(holding.asked) == 2)
        await world.server("s2")
        await holding.close()
        world.servers.remove(holding)
        group = (await world.groups(1))[1]
    assert {turn.server for one in group.trajectories for turn in one.turns} == {"s2"}
    assert group.deliveries == 1


async def test_no_ticket_is_taken_while_nobody_could_answer(world: World) -> None:
    await world.publish_spec({"lake": LAKE})
    await world.server("s1", policy="random")
    await world.ticket()
    async with world.hub():
        await asyncio.sleep(1.5)
        queue = await world.bus.work_queue(TICKETS, "lake")
        (delivery,) = await queue.fetch(1, 10)  # still there, and never delivered before
        assert delivery.num_delivered == 1
        await delivery.nak()
        await world.server("s2")
        assert (await world.groups(1))[1].deliveries == 2


async def test_stragglers_are_left_behind_at_the_deadline(world: World) -> None:
    await world.publish_spec({"lake": LAKE})

    async def script(request: wire.GenerateRequest) -> str:
        if request.conversation_id.split(".")[-2] == "1":
            await asyncio.Event().wait()
        return "R"

    server = await world.server("s1", lambda request, _: script(request))
    await world.ticket(min_group_size=1, deadline_s=5.0)
    await world.ticket(deadline_s=5.0)
    async with world.hub():
        records = {record.ticket: record for record in await world.records(2)}
        await until(lambda: len(server.aborted) == 2)
    assert [one.episode for one in records[1].trajectories] == [0]
    assert (records[2].reason, records[2].detail) == (
        "deadline",
        "1 of at least 2 episodes after 5 s",
    )


async def test_a_group_that_cannot_be_in_time_is_given_up_where_late_ones_are_dropped(
    world: World,
) -> None:
    await world.publish_spec({"lake": LAKE}, sections={"train": {"on_late": "drop"}})
    held: list[str] = []

    async def script(context: str) -> str:
        if context.count("<|im_assistant|>") > 1:
            held.append(context)
            await asyncio.Event().wait()
        return "no move"

    server = await world.server("s1", lambda _, context: script(context), version=3)
    await world.ticket(max_staleness=1)
    async with world.hub():
        await until(lambda: len(held) == 2)
        server.version = 4
        await asyncio.sleep(1.2)
        assert await world.bus.last_seq(SAMPLES) == 0
        server.version = 5
        (closed,) = await world.records(1)
    assert (closed.reason, closed.detail) == (
        "late",
        "oldest token of version 3, learner at version 5, max_staleness 1",
    )


async def test_a_group_beyond_the_largest_message_is_closed(world: World) -> None:
    await world.publish_spec({"big": {**count(trouble="large", until=4)}, "lake": LAKE})
    await world.server()
    await world.ticket("big", group_size=1)
    await world.ticket()
    async with world.hub():
        records = {record.ticket: record for record in await world.records(2)}
    assert records[1].reason == "too_large"
    assert "the limit is 8388608" in records[1].detail
    assert isinstance(records[2], wire.Group)


async def test_evaluation_does_not_stop_training(world: World) -> None:
    """A hub of eight slots with two groups of training and far more evaluation than fits."""
    await world.publish_spec(
        {"lake": {**LAKE, "group_size": 4}}, sections={"eval": {"group_size": 1}}
    )

    async def script() -> str:
        await asyncio.sleep(0.05)
        return "no move"

    server = await world.server("s1", lambda *_: script())
    for _ in range(30):
        await world.eval_ticket(group_size=1)
    for _ in range(3):
        await world.ticket(group_size=4)
    async with world.hub("--n", "8"):
        await world.records(3)
        assert await world.bus.last_seq(EVALS) < 30
        await world.records(30, EVALS)
    assert len(server.asked) == (30 + 12) * 8


async def test_a_hub_says_what_it_is_and_does(world: World) -> None:
    await world.publish_spec({"lake": LAKE, "sea": LAKE})
    await world.server()
    await world.ticket()
    seen: list[wire.Metrics] = []

    async def watch() -> None:
        async for metrics in watch_metrics(world.bus):
            seen.append(metrics)

    watching = asyncio.create_task(watch())
    roster = Roster(world.bus)
    await roster.start()
    async with world.hub("--n", "17", "--id", "hub1", "--domains", "lake"):
        await until(
            lambda: roster.get("hub1") and any("env/success_rate" in one.values for one in seen)
        )
        presence = roster.get("hub1")
    watching.cancel()
    await roster.close()
    assert presence is not None
    assert (presence.role, presence.slots, presence.serves, presence.state) == (
        "envhub",
        17,
        ["lake"],
        "serving",
    )
    values = next(one.values for one in seen if "env/success_rate" in one.values)
    assert values["env/valid_action_rate"] == 1.0
    assert values["time/generate"] > 0
    assert values["perf/episodes_per_s"] > 0
    assert values["envhub/slots"] == 17
    assert values["length/error"] == pytest.approx(0, abs=0.2)  # all turns have two tokens
    assert {"length/calibration_50", "length/calibration_90"} <= values.keys()


async def test_a_hub_that_cannot_serve_the_run_says_why(world: World, tmp_path: Path) -> None:
    data = tmp_path / "q.jsonl"
    data.write_text('{"question": "q"}\n')
    qa = {"env": "qa", "env_args": {"path": str(data)}, "rewards": [{"name": "math"}]}
    await world.publish_spec({"lake": LAKE, "qa": qa})
    with pytest.raises(ConfigError, match="--domains: 'sea' is not allowed; the run has lake, qa"):
        await serve(world.options("--domains", "sea"), Stop())
    with pytest.raises(UserError, match=r"q\.jsonl:1: no column 'answer'"):
        await serve(world.options("--domains", "qa"), Stop())
    await world.publish_spec({"lake": LAKE}, data_digests={str(data): "0" * 32})
    child = world.spawn()
    assert await asyncio.to_thread(child.wait, 100) == 2
    assert child.stderr is not None
    lines = [line for line in child.stderr.read().splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert f"{data}: content differs from the run's" in lines[0]


async def test_agents_of_a_hub_that_is_killed_die_with_it_and_their_tickets_are_redelivered(
    world: World, tmp_path: Path
) -> None:
    pids = tmp_path / "pids"
    programs = Path(KIT).with_name("agent_programs.py")
    args = {"command": ["python", str(programs), "waits"], "env": {"PIDS": str(pids)}}
    agent = {
        "env": "agent",
        "env_args": args,
        "context": "steps",
        "max_turns": 4,
        "group_size": 2,
        "sampling": {"max_tokens": 4},
    }
    await world.publish_spec({"game": agent})
    holding = await world.server("s1", lambda *_: asyncio.Event().wait(), version=2)  # type: ignore[arg-type,return-value]
    number = await world.ticket("game")
    child = world.spawn("--id", "killed")
    await until(lambda: len(holding.asked) == 2, 30)
    child.send_signal(signal.SIGKILL)
    child.wait()
    started = [int(pid) for pid in pids.read_text().split()]
    assert len(started) == 2
    await until(lambda: not any(is_alive(pid) for pid in started), 5)
    holding.script = lambda request, context: f"r{context.count('<|im_user|>')}"
    async with world.hub("--id", "heir"):
        group = (await world.groups(1))[number]
        await world.settled()
    assert (group.hub, group.deliveries, [one.episode for one in group.trajectories]) == (
        "heir",
        2,
        [0, 1],
    )
    for one in group.trajectories:
        text = world.tokenizer.decode(one.token_ids.array().tolist(), skip_special_tokens=False)
        assert text.endswith("r1<|im_end|><|im_user|>more<|im_end|><|im_assistant|>r2<|im_end|>")
        assert one.version_runs.array().tolist() == [2, 6]
        assert set(one.logprobs.array()[one.loss_mask.array() == 1].tolist()) == {-0.25}
        assert ([turn.server for turn in one.turns], one.reward, one.end) == (
            ["s1", "s1"],
            0.75,
            "terminated",
        )


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_a_running_hub_follows_the_domains_of_a_new_epoch(world: World) -> None:
    """One that is added is played at once; one that is gone is left, and its tickets in hand go
    back to their queue.
    """
    await world.publish_spec({"lake": LAKE})
    asked = asyncio.Event()

    async def answer() -> str:
        if not asked.is_set():  # the first request hangs
            asked.set()
            await asyncio.Event().wait()
        return "R"

    await world.server("s1", lambda *_: answer())
    await world.ticket("lake", group_size=1)
    async with world.hub():
        await until(asked.is_set)
        await world.publish_spec({"sea": LAKE})
        await world.ticket("sea", group_size=1)
        assert set(await world.groups(1)) == {2}
        await until(lambda: _pending(world, "lake"))
        await world.ticket("lake", group_size=1)
        await world.ticket("sea", group_size=1)
        assert set(await world.groups(2)) == {2, 4}
    assert await world.bus.depth(TICKETS) == {"lake": 2}


async def _pending(world: World, domain: str) -> bool:
    """Whether a ticket of the domain waits for whoever asks next."""
    queue = await world.bus.work_queue(TICKETS, domain)
    deliveries = await queue.fetch(1, 0.2)
    for delivery in deliveries:
        await delivery.nak()
    return bool(deliveries)
