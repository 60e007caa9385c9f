"""Real reward hubs on a real broker: scored once, passed on, closed with a reason, never lost,
never a made-up zero.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import large_groups
import msgspec
import pytest
from aiohttp import web
from waits import LONG_S, until

from broker.contract import codec, wire
from broker.contract.streams import CONTROL, DEAD, EPISODES, EVALS, PARTS, SAMPLES, Stream
from broker.jetstream.bus import Bus, LogRecord
from broker.jetstream.core_messages import watch_metrics
from broker.jetstream.publish import store_message
from broker.runtime.presence import Roster, census
from broker.settings import runspec

ROOT = Path(__file__).parents[2]
FUNCTIONS = str(ROOT / "tests" / "kit" / "reward_functions.py")
CONFIG: dict[str, Any] = {
    "domains": {
        "qa": {
            "env": "qa",
            "rewards": [
                {"name": "math_answer", "weight": 2.0},
                {"name": f"{FUNCTIONS}:length", "weight": -0.125, "pool": "style"},
            ],
        },
        "trap": {"env": "qa", "rewards": [{"name": f"{FUNCTIONS}:hangs_on_x"}]},
        "lake": {"env": "frozenlake"},
    },
    "rewardhub": {
        "workers": 2,
        "timeout_s": 1.0,
        "max_retries": 1,
        "max_groups": 4,
        "drain_timeout_s": 20.0,
    },
}


def trajectory(episode: int, response: str) -> wire.Trajectory:
    return wire.Trajectory(
        episode=episode,
        token_ids=wire.column([5, 6, 7], "<i4"),
        loss_mask=wire.column([0, 1, 1], "|u1"),
        logprobs=wire.column([0, -1, -2], "<f4"),
        version_runs=wire.column([4, 2], "<i4"),
        turns=[
            wire.Turn(start=1, end=3, reward=0.0, valid=True, finish_reason="stop", server="r1")
        ],
        reward=0.0,
        reward_parts={},
        success=False,
        end="terminated",
        response=response,
    )


def group(
    ticket: int,
    *responses: str,
    domain: str = "qa",
    pools: tuple[str, ...] = ("default", "style"),
    eval_step: int = -1,
) -> wire.Group:
    return wire.Group(
        ticket=ticket, domain=domain, task_index=0, min_version=0, hub="e1", deliveries=1, pools=list(pools),
        prompt="6 * 7?",
        reference="6 * 7 = 42\n#### 42", trajectories=[trajectory(i, text) for i, text in enumerate(responses)],
        eval_step=eval_step,
    )  # fmt: skip


class HubProcess:
    """One ``rewardhub`` as a child process."""

    def __init__(self, process: asyncio.subprocess.Process, name: str) -> None:
        self.process, self.name = process, name

    async def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """Send a signal and wait; exit code and what it wrote to stderr."""
        if self.process.returncode is None:
            self.process.send_signal(number)
        return await self.wait()

    async def wait(self) -> tuple[int, str]:
        _, error = await asyncio.wait_for(self.process.communicate(), LONG_S)
        assert self.process.returncode is not None
        return self.process.returncode, error.decode()


@asynccontextmanager
async def hub(
    url: str,
    run: str,
    name: str,
    *words: str,
    program: tuple[str, ...] = ("-m", "rewardhub.cli"),
    **variables: str,
) -> AsyncIterator[HubProcess]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, *program, "--broker", url, "--run", run, "--id", name, *words,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
    )  # fmt: skip
    started = HubProcess(process, name)
    try:
        yield started
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


async def publish_spec(bus: Bus, config: dict[str, Any] = CONFIG) -> None:
    spec = wire.RunSpec(
        run=bus.run, wire_version=wire.WIRE_VERSION, epoch=1, config=config, model_path="none"
    )
    await runspec.publish_runspec(bus, spec)


async def put(bus: Bus, one: wire.Group) -> None:
    await bus.publish(EPISODES, one, key=one.pools[0], ticket=one.ticket)


async def put_bytes(bus: Bus, pool: str, data: bytes, ticket: int, eval_step: int = -1) -> None:
    headers = {wire.TICKET_HEADER: str(ticket)} if ticket else {}
    if eval_step >= 0:
        headers[wire.EVAL_HEADER] = str(eval_step)
    await store_message(
        bus.link,
        EPISODES.stream_name(bus.run),
        EPISODES.subject(bus.run, f"{pool}.tickets-9"),
        data,
        headers,
    )


async def records(
    bus: Bus, stream: Stream, count: int, within_s: float = LONG_S
) -> list[LogRecord]:
    """The first ``count`` records of a log."""
    found: list[LogRecord] = []
    async with asyncio.timeout(within_s):
        async for record in bus.read_log(stream, 1):
            found.append(record)
            if len(found) == count:
                break
    return found


async def empty(bus: Bus) -> bool:
    return not sum((await bus.depth(EPISODES)).values())


async def test_groups_visit_their_pools_and_end_in_their_log(bus: Bus, broker_url: str) -> None:
    await publish_spec(bus)
    for ticket in (1, 2):
        await put(bus, group(ticket, "#### 42", "#### 41"))
    await put(bus, group(3, "so 42", eval_step=20))
    async with (
        hub(broker_url, bus.run, "math", "--pools", "default"),
        hub(broker_url, bus.run, "style", "--pools", "style"),
    ):
        found = await records(bus, SAMPLES, 2)
        (measured,) = await records(bus, EVALS, 1)
        await until(lambda: empty(bus))
    assert sorted(record.ticket for record in found) == [1, 2]
    for record in found:
        done = record.message
        assert isinstance(done, wire.Group)
        assert (done.ticket, done.pools, done.reward_hubs) == (record.ticket, [], ["math", "style"])
        right, wrong = done.trajectories
        assert (right.reward, right.reward_parts, right.success) == (
            2.0 - 7 / 8,
            {"math_answer": 1.0, "length": 7.0},
            True,
        )
        assert (wrong.reward, wrong.reward_parts, wrong.success) == (
            -7 / 8,
            {"math_answer": 0.0, "length": 7.0},
            False,
        )
        assert done.reward_s > 0
        assert done.reference == "6 * 7 = 42\n#### 42"
    assert isinstance(measured.message, wire.Group)
    assert (measured.message.eval_step, measured.message.trajectories[0].success) == (20, True)
    assert await bus.last_seq(DEAD) == 0


async def test_a_costly_answer_scores_the_lowest_and_its_group_goes_on(
    bus: Bus, broker_url: str
) -> None:
    await publish_spec(bus, {**CONFIG, "rewardhub": {**CONFIG["rewardhub"], "timeout_s": 60.0}})
    await put(
        bus, group(1, r"\boxed{\binom{10^9}{5\cdot 10^8}}", "#### 42", r"\boxed{10^{10^{10}}}")
    )
    async with hub(broker_url, bus.run, "both"):
        (record,) = await records(bus, SAMPLES, 1)
    assert isinstance(record.message, wire.Group)
    slow, right, large = record.message.trajectories
    blamed = {"math_answer": 0.0, "math_answer/too_costly": 1.0}
    assert not slow.success
    assert {name: slow.reward_parts[name] for name in blamed} == blamed
    assert {name: large.reward_parts[name] for name in blamed} == blamed
    assert (right.reward_parts, right.success) == ({"math_answer": 1.0, "length": 7.0}, True)
    assert await bus.last_seq(DEAD) == 0


async def test_a_group_in_parts_is_scored_and_its_learner_keeps_one_upload(
    bus: Bus, broker_url: str
) -> None:
    await publish_spec(bus)
    one = large_groups.group(
        1, 5 * large_groups.MB, domain="qa", pools=["default", "style"], reference="#### 42"
    )
    await put(bus, one)
    async with (
        hub(broker_url, bus.run, "math", "--pools", "default"),
        hub(broker_url, bus.run, "style", "--pools", "style"),
    ):
        (record,) = await records(bus, SAMPLES, 1)
        await until(lambda: empty(bus))
        assert isinstance(record.message, wire.Group)
        assert (record.message.pools, record.message.reward_hubs) == ([], ["math", "style"])
        assert record.message.trajectories[0].token_ids == one.trajectories[0].token_ids
    # of the environment hub and of both pools; hubs may delete none
    assert (await bus.depth(PARTS))[""] == 15
    assert record.parted is not None
    bus.drop_other_parts(record.parted)

    async def only_the_last() -> bool:
        return (await bus.depth(PARTS))[""] == 5

    await until(only_the_last)
    assert (await records(bus, SAMPLES, 1))[0].message == record.message


async def test_a_reward_that_hangs_closes_its_ticket_and_nothing_else(
    bus: Bus, broker_url: str
) -> None:
    await publish_spec(bus)
    bad = group(1, "fine", "x", domain="trap", pools=("default",))
    await put(bus, bad)
    for ticket in range(2, 8):
        await put(bus, group(ticket, "fine", "fine", domain="trap", pools=("default",)))
    async with hub(broker_url, bus.run, "h", "--workers", "2"):
        found = await records(bus, SAMPLES, 7)
        await until(lambda: empty(bus))
        (dead,) = await records(bus, DEAD, 1)
    by_ticket = {record.ticket: record.message for record in found}
    closed = by_ticket.pop(1)
    assert isinstance(closed, wire.Closed)
    assert (closed.reason, closed.domain, closed.by, closed.eval_step) == (
        "reward_error",
        "trap",
        "h",
        -1,
    )
    assert closed.detail.startswith("episode 1: ")
    assert closed.detail.endswith("hangs_on_x: no score within 1 s (after 2 tries)")
    assert sorted(by_ticket) == [2, 3, 4, 5, 6, 7]
    assert all(
        isinstance(m, wire.Group) and [t.reward for t in m.trajectories] == [1.0, 1.0]
        for m in by_ticket.values()
    )
    letter = dead.message
    assert isinstance(letter, wire.DeadLetter)
    assert (letter.stream, letter.ticket, letter.by, letter.data) == (
        "episodes",
        1,
        "h",
        codec.encode(bad),
    )
    assert letter.reason.startswith("reward_error: episode 1: ")


async def test_malformed_messages_close_their_ticket_by_the_header_and_work_goes_on(
    bus: Bus, broker_url: str
) -> None:
    await publish_spec(bus)
    unknown_field = msgspec.msgpack.encode(
        {**msgspec.msgpack.decode(codec.encode(group(12, "a", eval_step=5))), "extra": 1}
    )
    await put_bytes(bus, "default", b"\xc1 not MessagePack", 11)
    await put_bytes(bus, "default", unknown_field, 12, eval_step=5)
    await put_bytes(bus, "default", b"", 0)
    await put_bytes(bus, "default", codec.encode(group(13, "a", pools=("style",))), 13)
    await put_bytes(bus, "default", codec.encode(group(14, "a", domain="elsewhere")), 14)
    await put(bus, group(15, "#### 42"))
    async with hub(broker_url, bus.run, "h"):
        found = await records(bus, SAMPLES, 4)
        (of_evaluation,) = await records(bus, EVALS, 1)
        letters = await records(bus, DEAD, 5)
        await until(lambda: empty(bus))
    closed = {
        r.ticket: r.message for r in [*found, of_evaluation] if isinstance(r.message, wire.Closed)
    }
    assert {ticket: message.reason for ticket, message in closed.items()} == dict.fromkeys(
        (11, 12, 13, 14), "malformed"
    )
    assert (closed[12].eval_step, closed[11].eval_step) == (5, -1)
    assert closed[13].detail == "in the queue of pool default, but its pools are ['style']"
    assert closed[14].detail == "domain 'elsewhere' is not a domain of the run: qa, trap, lake"
    assert [r.ticket for r in found if isinstance(r.message, wire.Group)] == [15]
    assert sorted(r.message.ticket for r in letters if isinstance(r.message, wire.DeadLetter)) == [
        0,
        11,
        12,
        13,
        14,
    ]
    assert {r.message.data for r in letters if isinstance(r.message, wire.DeadLetter)} >= {
        b"\xc1 not MessagePack",
        unknown_field,
        b"",
    }


async def test_a_hub_that_is_killed_loses_nothing(bus: Bus, broker_url: str) -> None:
    slow = {**CONFIG, "rewardhub": {**CONFIG["rewardhub"], "timeout_s": 600.0}}
    await publish_spec(bus, slow)
    await put(bus, group(1, "x", domain="trap", pools=("default",)))
    await put(bus, group(2, "#### 42", pools=("default",)))
    async with hub(broker_url, bus.run, "first", "--workers", "2") as first:
        await records(bus, SAMPLES, 1)  # the good one is through, the other hangs
        code, _ = await first.end(signal.SIGKILL)
        assert code == -signal.SIGKILL
    await publish_spec(bus)  # as a learner that resumes with a shorter timeout would
    async with hub(broker_url, bus.run, "second"):
        found = await records(bus, SAMPLES, 2)
        await until(lambda: empty(bus))
    assert isinstance(found[0].message, wire.Group)
    assert isinstance(found[1].message, wire.Closed)
    assert (found[1].message.ticket, found[1].message.reason, found[1].message.by) == (
        1,
        "reward_error",
        "second",
    )


async def test_draining_finishes_what_it_has_and_leaves_the_rest(bus: Bus, broker_url: str) -> None:
    await publish_spec(bus)
    roster = Roster(bus)
    following = asyncio.create_task(roster.serve())
    async with hub(broker_url, bus.run, "h") as one:
        await until(lambda: [p for p in roster.alive("rewardhub") if p.state == "serving"])
        (presence,) = roster.alive("rewardhub")
        assert (presence.id, presence.serves, presence.slots) == ("h", ["default", "style"], 4)
        await put(bus, group(1, "fine", "x", domain="trap", pools=("default",)))
        await until(lambda: [p for p in roster.alive("rewardhub") if p.running])
        code, error = await one.end()
        assert code == 0, error
        assert "Traceback" not in error
        (ended,) = await records(bus, SAMPLES, 1)
        assert isinstance(ended.message, wire.Closed)  # it had its tries before the hub left
        await put(bus, group(2, "#### 42", pools=("default",)))
        assert await bus.depth(EPISODES) == {"default": 1}
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)


async def test_metrics_tell_what_it_does(bus: Bus, broker_url: str) -> None:
    await publish_spec(bus)
    seen: list[wire.Metrics] = []

    async def watch() -> None:
        async for metrics in watch_metrics(bus):
            seen.append(metrics)

    watching = asyncio.create_task(watch())
    async with hub(broker_url, bus.run, "h"):
        await until(lambda: seen)
        await put(bus, group(1, "#### 42", "#### 1", pools=("default",)))
        await until(lambda: any(m.values.get("rewardhub/groups") == 1 for m in seen))
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    scored = next(m for m in seen if "reward/mean" in m.values)
    assert (scored.role, scored.id) == ("rewardhub", "h")
    assert (scored.values["reward/mean"], scored.values["reward_parts/math_answer/mean"]) == (
        1.0,
        0.5,
    )
    assert scored.values["time/reward"] > 0
    assert seen[-1].values["process/cpu_s"] > 0.1


async def test_a_run_without_rewards_keeps_the_hub_idle_until_it_ends(
    bus: Bus, broker_url: str
) -> None:
    await publish_spec(bus, {"domains": {"lake": {"env": "frozenlake"}}})
    roster = Roster(bus)
    await roster.start()
    async with hub(broker_url, bus.run, "h") as one, asyncio.timeout(LONG_S):
        # who joins a run that is stopped already waits for it to begin again
        while not roster.alive("rewardhub"):
            await roster.changed(0.5)
        await roster.close()
        await bus.key_value(CONTROL).put(
            bus.run, wire.DesiredState(state="stopped", reason="all steps done")
        )
        code, error = await one.wait()
    assert code == 0, error
    assert "no domain of this run has a reward for a hub" in error


@pytest.mark.parametrize(
    ("words", "change", "line"),
    [
        (
            ("--pools", "styel"),
            {},
            "error: --pools: 'styel' is not allowed; the pools of this run are default, style",
        ),
        (
            (),
            {"name": "/nowhere/f.py:score"},
            "error: rewards.name: '/nowhere/f.py:score' is not allowed; there is no file /nowhere/f.py",
        ),
    ],
)
async def test_bad_input_is_one_line_and_exit_code_two(
    bus: Bus, broker_url: str, words: tuple[str, ...], change: dict[str, str], line: str
) -> None:
    config = CONFIG
    if change:
        config = {"domains": {"qa": {"env": "qa", "rewards": [change]}}}
    await publish_spec(bus, config)
    async with hub(broker_url, bus.run, "h", *words) as one:
        code, error = await one.wait()
    assert code == 2
    assert [text for text in error.splitlines() if text.startswith("error: ")] == [line]
    assert "Traceback" not in error


async def test_dedicated_hubs_for_each_kind_of_reward(bus: Bus, broker_url: str) -> None:
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        if request.method == "GET":
            return web.json_response({"data": [{"id": "j"}]})
        asked.append((await request.json())["messages"][0]["content"])
        if "nonsense" in asked[-1]:
            return web.json_response({"error": {"message": "the policy of this house"}}, status=400)
        usage = {"prompt_tokens": 30, "completion_tokens": 10}
        return web.json_response(
            {"choices": [{"message": {"content": "Score: 8"}}], "usage": usage}
        )

    app = web.Application()
    app.router.add_route("*", "/v1/{rest:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    judge = {
        "base_url": f"http://127.0.0.1:{runner.addresses[0][1]}/v1",
        "price_in": 1000.0,
        "template": "{prompt} {response}",
    }
    rewards = [
        {"name": "judge", "pool": "judges", "args": judge},
        {"name": "format", "weight": 0.5, "args": {"pattern": "#### \\d+"}},
        {"name": "length", "args": {"max_tokens": 4, "cache_tokens": 4}},
    ]
    await publish_spec(bus, {**CONFIG, "domains": {"qa": {"env": "qa", "rewards": rewards}}})
    await put(bus, group(1, "#### 42", "no", pools=("judges", "default")))
    await put(bus, group(2, "nonsense", pools=("judges", "default")))
    async with hub(broker_url, bus.run, "wrong", "--rewards", "format") as one:
        code, error = await one.wait()
    line = (
        "error: --rewards format: pool default also holds length (domains.qa.rewards.2); give one of them a "
        "separate pool"
    )
    assert (code, [text for text in error.splitlines() if text.startswith("error: ")]) == (
        2,
        [line],
    )
    async with (
        hub(broker_url, bus.run, "judging", "--rewards", "judge"),
        hub(broker_url, bus.run, "rules", "--rewards", "format,length"),
    ):
        found = {record.ticket: record.message for record in await records(bus, SAMPLES, 2)}
        await until(lambda: empty(bus))
    await runner.cleanup()
    done, closed = found[1], found[2]
    assert isinstance(done, wire.Group)
    assert done.reward_hubs == ["judging", "rules"]
    good, bad = done.trajectories
    notes = {
        "judge/tokens_in": 30.0,
        "judge/tokens_out": 10.0,
        "judge/cost": 0.03,
        "judge/cached": 0.0,
        "judge/asked": 1.0,
        "judge/truncated": 0.0,
    }
    # 2 of 4 tokens
    assert good.reward_parts == {"judge": 0.8, **notes, "format": 1.0, "length": -0.5}
    assert (good.reward, good.success) == (pytest.approx(0.8 + 0.5 - 0.5), False)
    assert bad.reward == pytest.approx(0.8 - 0.5)
    assert isinstance(closed, wire.Closed)
    refused = (
        f"episode 0: judge: domain 'qa', task 0: {judge['base_url']}: the endpoint answered 400: the policy of "
        f"this house"
    )
    assert (closed.reason, closed.by, closed.detail) == ("reward_error", "judging", refused)
    assert sorted(asked) == ["6 * 7? #### 42", "6 * 7? no", "6 * 7? nonsense"]


async def served_by(bus: Bus, name: str) -> list[str] | None:
    """The pools that a hub says it serves, None before it has said anything."""
    return next(
        (
            one.serves
            for one in await census(bus, bus.run)
            if one.id == name and one.state == "serving"
        ),
        None,
    )


async def test_a_running_hub_follows_the_pools_of_a_new_epoch(bus: Bus, broker_url: str) -> None:
    """It had nothing to do; the next epoch brings a pool, and the one after takes it away again."""

    async def serves(*pools: str) -> None:
        async def holds() -> bool:
            return await served_by(bus, "h1") == list(pools)

        await until(holds)

    nothing = {**CONFIG, "domains": {"lake": {"env": "frozenlake"}}}
    await publish_spec(bus, nothing)
    async with hub(broker_url, bus.run, "h1"):
        await serves()
        await publish_spec(
            bus,
            {
                **CONFIG,
                "domains": {
                    "qa": {"env": "qa", "rewards": [{"name": "math_answer", "pool": "late"}]}
                },
            },
        )
        await serves("late")
        await put(bus, group(1, "#### 42", "#### 41", pools=("late",)))
        (record,) = await records(bus, SAMPLES, 1)
        assert isinstance(record.message, wire.Group)
        assert [one.reward for one in record.message.trajectories] == [1.0, 0.0]
        await publish_spec(bus, nothing)
        await serves()
        await put(bus, group(2, "#### 42", pools=("late",)))
        await asyncio.sleep(1.5)
        assert not await empty(bus)
