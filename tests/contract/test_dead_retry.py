"""``broker dead retry`` with real hubs: what ended as a dead letter is done again for the
operator's eyes only.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import test_rewardhub as reward_world
from envhub_world import LAKE, World
from source_lines import line_of
from test_isolation import KIT, bad

from broker import cli
from broker.contract import codec, wire
from broker.contract.examples import EXAMPLES
from broker.contract.streams import DEAD, EPISODES, EVALS, EVALTICKETS, SAMPLES, TICKETS
from broker.errors import UserError
from broker.jetstream.bus import Bus
from broker.runtime.presence import census

RAISED_AT = line_of("envhub_bad.py", "raise ValueError(")
RAISED = f"ValueError: broken in two lines (envhub_bad.py:{RAISED_AT} in _raises)"


@pytest.fixture
async def world(bus: Bus, broker_url: str, tmp_path: Path) -> AsyncIterator[World]:
    made = World(bus, broker_url, tmp_path)
    yield made
    await made.close()


async def retry(world: World, number: int, *words: str) -> None:
    arguments = [
        "dead",
        "retry",
        str(number),
        "--broker",
        world.url,
        "--run",
        world.bus.run,
        *words,
    ]
    await cli.operate(cli.parser().parse_args(arguments))


async def positions(bus: Bus) -> list[int]:
    """The newest sequence of every stream that a ticket or its end could be in."""
    return [
        await bus.last_seq(stream)
        for stream in (TICKETS, EPISODES, SAMPLES, EVALTICKETS, EVALS, DEAD)
    ]


async def test_a_dead_ticket_is_played_again_and_nothing_is_stored(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    rewards = [{"name": f"{KIT}/reward_functions.py:length", "weight": 2.0}]
    domains = {"bad": bad("raises", group_size=1), "lake": {**LAKE, "rewards": rewards}}
    await world.publish_spec(
        domains, sections={"envhub": {"max_retries": 1}, "rewardhub": {"workers": 1}}
    )
    await world.server(version=7)
    await world.ticket("bad", group_size=1)
    async with world.hub("--id", "h"):
        (closed,) = await world.records(1)
        await world.settled()
        assert isinstance(closed, wire.Closed)
        for number, domain in ((2, "bad"), (3, "lake"), (4, "sea")):
            ticket = wire.Ticket(
                number=number, domain=domain, task_index=1, seed=5, min_version=0, max_staleness=1, group_size=2,
                min_group_size=2,
                deadline_s=60.0,
            )  # fmt: skip
            await world.bus.dead_letter(
                TICKETS,
                seq=0,
                ticket=number,
                reason="deadline: too slow",
                data=codec.encode(ticket),
            )
        await world.bus.dead_letter(TICKETS, seq=0, ticket=9, reason="malformed", data=b"\xc1")
        await world.bus.dead_letter(
            EVALS, seq=0, ticket=9, reason="odd", data=codec.encode(EXAMPLES[wire.Closed])
        )
        before = await positions(world.bus)

        await retry(world, 1)
        out = capsys.readouterr()
        assert out.out.splitlines() == [
            f"ticket 1, given up by h: env_error: episode 0, attempt 2: step raised {RAISED}",
            f"h gave up: env_error: 1 of 1 episodes failed; episode 0: step raised {RAISED}",
        ]
        assert out.err.endswith(
            "for inspection only: the result is neither stored nor trained on\n"
        )

        await retry(world, 2)  # this task of the domain goes well
        lines = capsys.readouterr().out.splitlines()
        assert lines[1].startswith("h played it, ")
        assert lines[2:] == [
            "  episode 0: solved, reward 1, env 1; terminated after 2 turns, versions 7-7",
            "    last response: R",
            "  episode 1: solved, reward 1, env 1; terminated after 2 turns, versions 7-7",
            "    last response: R",
        ]

        await retry(world, 2, "--json")
        found = json.loads(capsys.readouterr().out)
        (played,) = found["outcomes"]
        assert (found["ticket"], found["reason"], played["by"]) == (2, "deadline: too slow", "h")
        assert [(one["success"], one["reward"], one["turns"]) for one in played["episodes"]] == [
            (True, 1.0, 2)
        ] * 2

        with pytest.raises(UserError, match=r"has no rewardhub that serves pool 'default' now"):
            await retry(world, 3)
        with pytest.raises(UserError, match=r"has no envhub that serves domain 'sea' now"):
            await retry(world, 4)
        with pytest.raises(UserError, match="its 1 bytes do not decode, so they cannot be retried"):
            await retry(world, 5)
        with pytest.raises(
            UserError, match="expected a Ticket, an EvalTicket or a Group, found a Closed"
        ):
            await retry(world, 6)
        with pytest.raises(UserError, match="no dead letter 99 in run"):
            await retry(world, 99)
        capsys.readouterr()
        async with reward_world.hub(world.url, world.bus.run, "r") as hub:
            await reward_world.until(lambda: served(world.bus, "r"))
            await retry(world, 3)
            lines = capsys.readouterr().out.splitlines()
            at = lines.index("r scored it:")
            assert lines[at + 1].startswith("  episode 0: ")
            assert ", length 1; " in lines[at + 1]
            assert (await hub.end())[0] == 0
        assert await positions(world.bus) == before


async def served(bus: Bus, name: str) -> bool:
    return any(one.id == name and one.state == "serving" for one in await census(bus, bus.run))


async def test_a_dead_group_is_scored_again_elsewhere_if_there_is_an_elsewhere(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    await reward_world.publish_spec(world.bus)
    dead = reward_world.group(1, "fine", "x", domain="trap", pools=("default",))
    await world.bus.publish(DEAD, letter(dead), key="episodes")
    await world.bus.publish(
        DEAD, letter(reward_world.group(2, "#### 42", pools=("default", "style"))), key="episodes"
    )
    before = await positions(world.bus)
    async with (
        reward_world.hub(world.url, world.bus.run, "a", "--workers", "1"),
        reward_world.hub(world.url, world.bus.run, "b", "--workers", "1", "--pools", "default"),
    ):
        await reward_world.until(lambda: served(world.bus, "a"))
        await reward_world.until(lambda: served(world.bus, "b"))
        await retry(world, 1)
        line = capsys.readouterr().out.splitlines()[1]
        assert line.startswith("b gave up: reward_error: episode 1: ")
        assert line.endswith("hangs_on_x: no score within 1 s")
        await retry(world, 2)
        lines = capsys.readouterr().out.splitlines()
        assert [line for line in lines if line.endswith("scored it:")] == [
            "b scored it:",
            "a scored it:",
        ]
        assert lines[-2].startswith("  episode 0: solved, reward 1.125, math_answer 1, length 7; ")
    assert await positions(world.bus) == before


def letter(group: wire.Group) -> wire.DeadLetter:
    return wire.DeadLetter(
        stream="episodes",
        sequence=0,
        ticket=group.ticket,
        reason="reward_error: odd",
        by="a",
        data=codec.encode(group),
    )
