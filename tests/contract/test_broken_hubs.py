"""Hubs on hosts where nothing works: they stop taking work and say why, every ticket survives, and
they return by themselves.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import test_rewardhub as reward_world
from envhub_world import KIT, LAKE, World
from waits import LONG_S, until

from broker.contract import wire
from broker.contract.streams import SAMPLES, TICKETS
from broker.jetstream.bus import Bus
from broker.runtime.presence import Roster
from rlearner.ops.status import on_broker, text_of

NUM_TICKETS = 12
ON_DISK = {
    "run": "r", "folder": "runs/r", "step": 0, "steps": 1, "step_at": None, "ledger_file": "none yet",
    "checkpoints": [], "figures": {},
    "warnings": [], "tickets": {}, "dead": {},
}  # fmt: skip
# A hub whose workers are started with another interpreter than its own, which may not be there.
OTHER_PYTHON = "import os, sys; sys.executable = os.environ['WORKER_PYTHON']; from {role}.cli import main; sys.exit(main())"
SCORE = {"env": "qa", "rewards": [{"name": f"{Path(KIT).parent}/bad_host.py:score"}]}
CRASHES = {"env": "qa", "rewards": [{"name": f"{reward_world.FUNCTIONS}:crashes"}]}
LENGTH = {"env": "qa", "rewards": [{"name": f"{reward_world.FUNCTIONS}:length"}]}
REWARDHUB = {"workers": 1, "timeout_s": 30.0, "max_retries": 1, "pass_env": ["BAD_HOST"]}


@pytest.fixture
async def world(bus: Bus, broker_url: str, tmp_path: Path) -> AsyncIterator[World]:
    made = World(bus, broker_url, tmp_path)
    yield made
    await made.close()


@pytest.fixture
async def roster(bus: Bus) -> AsyncIterator[Roster]:
    made = Roster(bus)
    await made.start()
    yield made
    await made.close()


def bad_host(env: str = "Simulator", **section: Any) -> dict[str, Any]:
    return {
        "env": f"{Path(KIT).parent}/bad_host.py:{env}",
        "max_turns": 5,
        "group_size": 2,
        **section,
    }


def python(file: Path) -> None:
    """Make the interpreter of a hub's workers."""
    file.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    file.chmod(0o755)


async def seen(roster: Roster, name: str, state: str, *, serves: list[str]) -> wire.Presence:
    """The presence of a hub once it is so."""

    def found() -> wire.Presence | None:
        one = roster.get(name)
        return one if one is not None and (one.state, one.serves) == (state, serves) else None

    await until(found)
    presence = found()
    assert presence is not None
    return presence


async def test_a_hub_where_every_reset_raises_costs_no_ticket_while_another_works(
    world: World, roster: Roster
) -> None:
    await world.publish_spec(
        {"d": bad_host(), "lake": LAKE}, sections={"envhub": {"max_retries": 1}}
    )
    await world.server()
    flag = world.folder / "bad"
    flag.touch()
    world.spawn("--n", "8", "--id", "broken", BAD_HOST=str(flag))
    await seen(roster, "broken", "serving", serves=["d", "lake"])
    for _ in range(NUM_TICKETS):
        await world.ticket("d")
    presence = await seen(roster, "broken", "serving", serves=["lake"])
    assert presence.problem.startswith(
        "domain d: 4 tickets in a row failed here, the last: reset raised OSError: the simulator is not inst"
    )
    said = re.compile(
        r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d (WARNING|ERROR) .*the simulator is not installed"
    )
    await until(lambda: said.match(getattr(roster.get("broken"), "said", "")))
    shown = text_of({**ON_DISK, **await on_broker(world.bus)}, 0.0)
    assert any(said.match(line.strip()) for line in shown)
    await world.ticket()  # the other domain is served as before
    assert (await world.records(1))[0].domain == "lake"
    world.spawn("--n", "8", "--id", "healthy")
    records = await world.records(NUM_TICKETS + 1)
    await world.settled()
    assert {(type(record), record.hub) for record in records[1:]} == {(wire.Group, "healthy")}
    assert sorted(record.ticket for record in records) == list(range(1, NUM_TICKETS + 2))
    assert max(record.deliveries for record in records) <= 4


@pytest.mark.parametrize("env", ["Simulator", "Stepper"])
async def test_where_all_hubs_are_broken_the_run_waits_and_goes_on_when_one_is_repaired(
    world: World, roster: Roster, monkeypatch: pytest.MonkeyPatch, env: str
) -> None:
    monkeypatch.setattr("broker.runtime.breaker.FIRST_PAUSE_S", 0.5)
    await world.publish_spec(
        {"d": bad_host(env)}, sections={"envhub": {"max_retries": 1, "broken_after": 2}}
    )
    await world.server()
    flag = world.folder / "bad"
    flag.touch()
    monkeypatch.setenv("BAD_HOST", str(flag))
    for _ in range(4):
        await world.ticket("d", deadline_s=600.0)
    async with world.hub("--n", "4", "--id", "h"):
        presence = await seen(roster, "h", "failed", serves=[])
        assert presence.problem.startswith(
            f"domain d: 2 tickets in a row failed here, the last: {'reset' if env == 'Simulator' else 'step'} raised"
        )
        assert any(
            "domain d: 2 tickets in a row" in line
            for line in text_of({**ON_DISK, **await on_broker(world.bus)}, 0.0)
        )
        await until(lambda: "and 3 trials failed here" in getattr(roster.get("h"), "problem", ""))
        assert await world.bus.last_seq(SAMPLES) == 0
        flag.unlink()
        assert (await seen(roster, "h", "serving", serves=["d"])).problem == ""
        groups = await world.groups(4)
        await world.settled()
    assert sorted(groups) == [1, 2, 3, 4]
    assert max(group.deliveries for group in groups.values()) <= 4  # trials cost none


async def test_a_host_where_no_worker_process_can_be_started_gets_no_tickets_until_one_can(
    world: World, roster: Roster
) -> None:
    await world.publish_spec(
        {
            "d": {"env": f"{KIT}:Count", "isolation": "process", "group_size": 2, "max_turns": 5},
            "lake": LAKE,
        }
    )
    await world.server()
    interpreter = world.folder / "python"
    for _ in range(6):
        await world.ticket("d")
    child = world.spawn(
        "--n",
        "16",
        "--id",
        "h",
        program=("-c", OTHER_PYTHON.format(role="envhub")),
        WORKER_PYTHON=str(interpreter),
    )
    presence = await seen(roster, "h", "serving", serves=["lake"])
    assert (
        "5 tickets in a row failed here, the last: no worker process can be started: [Errno 2] No such file"
        in presence.problem
    )
    await asyncio.sleep(3)  # a trial or two
    assert await world.bus.last_seq(SAMPLES) == 0
    python(interpreter)
    groups = await world.groups(6)
    assert sorted(groups) == [1, 2, 3, 4, 5, 6]
    assert max(group.deliveries for group in groups.values()) <= 3
    child.terminate()
    assert await asyncio.to_thread(child.wait, LONG_S) == 0
    assert child.stderr is not None
    lines = child.stderr.read().splitlines()
    assert (
        len([line for line in lines if "taking no more of them until a trial succeeds" in line])
        == 1
    )
    assert len([line for line in lines if "domain d works again" in line]) == 1


async def test_a_hub_that_plays_few_tickets_at_once_does_not_wait_for_more_to_hang(
    world: World, roster: Roster
) -> None:
    """With four tickets at once and retries it would else hang for 4 x 4 seconds before a fifth
    could fail.
    """
    await world.publish_spec(
        {
            "d": {
                "env": f"{KIT}:Count",
                "env_args": {"trouble": "hang in step", "seconds": 600},
                "max_turns": 5,
                "group_size": 4,
            }
        },
        sections={"envhub": {"step_timeout_s": 1.0, "max_retries": 3}},
    )
    await world.server()
    for _ in range(4):
        await world.ticket("d", group_size=4)
    async with world.hub("--n", "8", "--id", "h"):
        presence = await seen(roster, "h", "failed", serves=[])
        assert presence.problem.startswith(
            "domain d: 2 tickets in a row failed here, the last: step did not return within 1 s"
        )
        (queue,) = [await world.bus.depth(TICKETS)]
        assert await world.bus.last_seq(SAMPLES) == 0
    assert sum(queue.values()) == 4


async def test_a_ticket_that_fails_where_others_succeed_is_closed_with_its_reason(
    world: World,
) -> None:
    domain = {
        "env": f"{Path(KIT).parent}/envhub_bad.py:Bad",
        "env_args": {"does": ["raises"]},
        "max_turns": 5,
        "group_size": 2,
    }
    await world.publish_spec({"bad": domain}, sections={"envhub": {"max_retries": 1}})
    await world.server()
    for _ in range(6):
        await world.ticket("bad")  # a ticket's task is its number less one: the first one raises
    async with world.hub("--n", "2"):
        records = {record.ticket: record for record in await world.records(6)}
        await world.settled()
    assert (records[1].reason, type(records[1])) == ("env_error", wire.Closed)
    assert all(isinstance(records[number], wire.Group) for number in range(2, 7))


async def groups(bus: Bus, count: int) -> dict[int, wire.Group]:
    """The first records of the samples log, all of which are groups."""
    found = [record.message for record in await reward_world.records(bus, SAMPLES, count)]
    assert {type(message) for message in found} == {wire.Group}
    return {message.ticket: message for message in found if isinstance(message, wire.Group)}


@pytest.mark.parametrize("other", [True, False])
async def test_a_reward_hub_that_can_score_nothing_costs_no_group(
    bus: Bus, broker_url: str, roster: Roster, tmp_path: Path, other: bool
) -> None:
    flag = tmp_path / "bad"
    flag.touch()
    await reward_world.publish_spec(bus, {"domains": {"qa": SCORE}, "rewardhub": REWARDHUB})
    for ticket in range(1, 9):
        await reward_world.put(
            bus, reward_world.group(ticket, "four", "sixsix", pools=("default",))
        )
    async with reward_world.hub(broker_url, bus.run, "broken", BAD_HOST=str(flag)) as broken:
        presence = await seen(roster, "broken", "failed", serves=[])
        assert presence.problem.startswith(
            "pool default: 5 tickets in a row failed here, the last: episode "
        )
        assert "OSError: the simulator is not installed" in presence.problem
        assert await bus.last_seq(SAMPLES) == 0
        if other:
            async with reward_world.hub(broker_url, bus.run, "healthy"):
                found = await groups(bus, 8)
                await until(lambda: reward_world.empty(bus))
        else:
            await until(
                lambda: "1 trial failed here" in getattr(roster.get("broken"), "problem", "")
            )
            flag.unlink()
            found = await groups(bus, 8)
            await seen(roster, "broken", "serving", serves=["default"])
            await until(lambda: reward_world.empty(bus))
        code, log = await broken.end()
    assert code == 0
    assert sorted(found) == list(range(1, 9))
    assert {name for group in found.values() for name in group.reward_hubs} == {
        "healthy" if other else "broken"
    }
    assert {tuple(one.reward for one in group.trajectories) for group in found.values()} == {
        (4.0, 6.0)
    }
    assert log.count("taking no more of them until a trial succeeds") == 1
    assert log.count("pool default works again") == (not other)


async def test_a_reward_hub_whose_workers_cannot_start_any_more_hands_back_and_says_so(
    bus: Bus, broker_url: str, roster: Roster, tmp_path: Path
) -> None:
    interpreter = tmp_path / "python"
    python(interpreter)
    await reward_world.publish_spec(
        bus, {"domains": {"crash": CRASHES, "qa": LENGTH}, "rewardhub": REWARDHUB}
    )
    program = ("-c", OTHER_PYTHON.format(role="rewardhub"))
    async with reward_world.hub(
        broker_url, bus.run, "h", program=program, WORKER_PYTHON=str(interpreter)
    ):
        await seen(roster, "h", "serving", serves=["default"])
        interpreter.unlink()
        # ends the only worker
        await reward_world.put(
            bus, reward_world.group(1, "four", domain="crash", pools=("default",))
        )
        for ticket in range(2, 8):
            await reward_world.put(bus, reward_world.group(ticket, "four", pools=("default",)))
        presence = await seen(roster, "h", "failed", serves=[])
        assert (
            "cannot start a worker process: [Errno 2] No such file or directory" in presence.problem
        )
        assert await bus.last_seq(SAMPLES) == 0
        python(interpreter)
        found = {
            record.ticket: record.message for record in await reward_world.records(bus, SAMPLES, 7)
        }
    crashed = found.pop(1)
    assert isinstance(crashed, wire.Closed)
    assert (crashed.reason, crashed.by) == ("reward_error", "h")
    assert sorted(found) == [2, 3, 4, 5, 6, 7]
    assert all(
        isinstance(message, wire.Group) and message.trajectories[0].reward == 4.0
        for message in found.values()
    )
