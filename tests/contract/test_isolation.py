"""Whatever an environment or a reward does, with real hubs and real worker processes: its own
tickets are closed with the reason and kept for the operator, all others become groups."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import test_rewardhub as reward_world
from envhub_world import LAKE, World
from source_lines import line_of
from waits import LONG_S, until

from broker.contract import codec, wire
from broker.contract.streams import DEAD, SAMPLES
from broker.jetstream.bus import Bus

KIT = Path(__file__).parents[1] / "kit"
LEAK_LINE = line_of("reward_functions.py", "def leaks(") + 2
FAULTS = {
    "sleeps": "step did not return within 2 s",
    "raises": f"step raised ValueError: broken in two lines (envhub_bad.py:{line_of('envhub_bad.py', 'raise ValueError(')} in _raises)",
    "aborts in reset": "reset: the worker process died by SIGABRT",
    "reads_nowhere": "step: the worker process died by SIGSEGV",
    "leaks": "step raised MemoryError",
    "returns_nan": "step returned reward nan; it must be finite",
    "returns_ten_megabytes": "step returned an Observation whose text has 10000000 bytes, the limit is 1048576",
    "returns_text_done": "step returned done str 'False', not True or False",
}


@pytest.fixture
async def world(bus: Bus, broker_url: str, tmp_path: Path) -> AsyncIterator[World]:
    made = World(bus, broker_url, tmp_path)
    yield made
    await made.close()


def bad(*does: str, **section: Any) -> dict[str, Any]:
    return {
        "env": f"{KIT}/envhub_bad.py:Bad",
        "env_args": {"does": list(does)},
        "max_turns": 5,
        "group_size": 2,
        **section,
    }


async def letters(bus: Bus, count: int) -> dict[int, wire.DeadLetter]:
    found: dict[int, wire.DeadLetter] = {}
    async with asyncio.timeout(LONG_S):
        async for record in bus.read_log(DEAD, 1):
            assert isinstance(record.message, wire.DeadLetter)
            found[record.message.ticket] = record.message
            if len(found) == count:
                break
    return found


async def test_an_environment_may_do_whatever_it_likes(world: World) -> None:
    section = {"step_timeout_s": 2.0, "max_retries": 1, "worker_memory_mib": 100}
    await world.publish_spec({"bad": bad(*FAULTS), "lake": LAKE}, sections={"envhub": section})
    await world.server()
    tickets = [await world.ticket("bad") for _ in FAULTS]  # a ticket's task is its number less one
    good = [await world.ticket("bad"), *[await world.ticket() for _ in range(10)]]
    before = len(psutil.Process().children(recursive=True))
    async with world.hub("--n", "64", "--id", "h"):
        records = {
            record.ticket: record for record in await world.records(len(tickets) + len(good))
        }
        await world.settled()
    for ticket, (fault, detail) in zip(tickets, FAULTS.items(), strict=True):
        closed = records[ticket]
        assert isinstance(closed, wire.Closed), fault
        assert (closed.reason, closed.by, closed.domain) == ("env_error", "h", "bad")
        assert detail.strip() in closed.detail, fault
        assert ", attempt 2: " in closed.detail, fault  # it was tried again, in another process
    for ticket in good:
        group = records[ticket]
        assert isinstance(group, wire.Group)
        assert len(group.trajectories) == 2
    dead = await letters(world.bus, len(tickets))
    assert sorted(dead) == tickets
    for ticket, letter in dead.items():
        assert (letter.stream, letter.by) == ("tickets", "h")
        assert letter.reason == f"env_error: {records[ticket].detail}"
        assert codec.decode(letter.data, wire.Ticket).number == ticket
    async with asyncio.timeout(LONG_S):
        while len(psutil.Process().children(recursive=True)) > before:  # noqa: ASYNC110 - nothing stays behind
            await asyncio.sleep(0.05)


async def test_a_group_goes_on_without_its_straggler_where_that_is_allowed(world: World) -> None:
    """Environments hang in one episode of each group: at the deadline it closes with the others, or
    without a group.
    """
    env = f"{KIT}/envhub_bad.py:Straggler"
    await world.publish_spec(
        {
            "slow": {
                "env": env,
                "env_args": {"folder": str(world.folder)},
                "max_turns": 5,
                "group_size": 3,
            }
        }
    )
    await world.server()
    await world.ticket("slow", group_size=3, min_group_size=2, deadline_s=8.0)
    await world.ticket("slow", group_size=3, min_group_size=3, deadline_s=8.0)
    began = time.monotonic()
    async with world.hub("--n", "8"):
        records = {record.ticket: record for record in await world.records(2)}
        assert time.monotonic() - began < LONG_S
        stragglers = [int(file.suffix[1:]) for file in world.folder.glob("straggler.*")]
        assert len(stragglers) == 2
        # given up, and its process with it
        await until(lambda: not any(map(psutil.pid_exists, stragglers)))
    assert isinstance(records[1], wire.Group)
    assert len(records[1].trajectories) == 2
    assert (records[2].reason, records[2].detail) == (
        "deadline",
        "2 of at least 3 episodes after 8 s",
    )


async def test_a_hub_that_has_lost_too_many_threads_ends_and_its_work_goes_on(world: World) -> None:
    section = {
        "step_timeout_s": 0.5,
        "max_retries": 30,
        "max_hung_threads": 3,
        "drain_timeout_s": 1,
    }
    await world.publish_spec(
        {"bad": bad("sleeps", isolation="thread"), "lake": LAKE}, sections={"envhub": section}
    )
    await world.server()
    await world.ticket("bad", group_size=1, min_group_size=1)
    child = world.spawn("--n", "4", "--id", "first", "--domains", "bad")
    assert await asyncio.to_thread(child.wait, 100) == 1
    assert child.stderr is not None
    said = child.stderr.read()
    assert (
        "TooManyHung: 3 threads hang in environments (envhub.max_hung_threads); set isolation: process"
        in said
    )
    await world.ticket()
    async with world.hub("--n", "4", "--domains", "lake"):
        (group,) = await world.records(1)
    assert isinstance(group, wire.Group)


async def test_a_reward_may_do_whatever_it_likes(bus: Bus, broker_url: str) -> None:
    faults = {
        "hangs": "no score within 4 s (after 2 tries)",
        "crashes": "the worker process died by SIGABRT (after 2 tries)",
        "leaks": f"MemoryError (reward_functions.py:{LEAK_LINE} in leaks) (after 2 tries)",
        "nan": "the reward must be finite, got nan",
        "ten_megabytes": "...",
        "too_many_parts": "a reward has at most 64 parts with printable names of at most 100 characters",
    }
    fine = {"prints_much": 3.0, "length": 4.0}
    domains = {
        name: {"env": "qa", "rewards": [{"name": f"{reward_world.FUNCTIONS}:{name}"}]}
        for name in (*faults, *fine)
    }
    section = {"workers": 2, "timeout_s": 4.0, "max_retries": 1, "worker_memory_mib": 150}
    await reward_world.publish_spec(bus, {"domains": domains, "rewardhub": section})
    names = [*faults, *fine, *["length"] * 10]
    for ticket, name in enumerate(names, start=1):
        await reward_world.put(
            bus, reward_world.group(ticket, "four", domain=name, pools=("default",))
        )
    async with reward_world.hub(broker_url, bus.run, "h") as hub:
        records = {
            record.ticket: record.message
            for record in await reward_world.records(bus, SAMPLES, len(names))
        }
        await reward_world.until(lambda: reward_world.empty(bus))
        code, log = await hub.end()
    assert code == 0
    assert len(log) < 256 << 10
    for ticket, name in enumerate(names, start=1):
        record = records[ticket]
        if name in fine:
            assert isinstance(record, wire.Group), name
            assert [one.reward for one in record.trajectories] == [fine[name]]
        else:
            assert isinstance(record, wire.Closed), name
            assert record.reason == "reward_error"
            assert record.detail.endswith(faults[name]), name
    assert sorted(await letters(bus, len(faults))) == list(range(1, len(faults) + 1))
