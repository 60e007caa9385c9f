"""The operator's commands over a real short run: the learner, nats-server, a tap, and a made-up
fleet.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import learner_fleet as fleet
import pytest
from waits import LONG_S

from broker.contract import wire
from broker.contract.streams import CONTROL, RUNS, SAMPLES
from broker.jetstream.api import call_api
from broker.jetstream.bus import Bus
from broker.nats.nats_errors import ApiError
from broker.runtime.announce import Announcer
from broker.runtime.process import Stop
from broker.settings.run_settings import RunSettings
from learner.credit.archive import archive_files
from learner.prepare import to_yaml
from learner.run_folder import note_broker
from learner.service import serve_learner

ROOT = Path(__file__).parents[2]


def eventful(ticket: wire.Ticket) -> list[wire.Message | bytes]:
    good = fleet.group(ticket, ticket.min_version)
    match ticket.number:
        case 1:
            return [b"\x81no message", good]
        case 2:
            return [good, good]
        case 3:
            return [
                wire.Closed(
                    ticket=3, domain="lake", reason="env_error", detail="it broke", by="made-up"
                )
            ]
        case _:
            return [good]


async def command(*arguments: str, **variables: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of ``rlearner …``."""
    environment = {
        name: value for name, value in os.environ.items() if name not in ("RL_BROKER", "RL_RUN")
    } | variables
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "rlearner.cli", *arguments, stdout=pipe, stderr=pipe, env=environment
    )
    out, err = await asyncio.wait_for(child.communicate(), 90)
    assert child.returncode is not None
    return child.returncode, out.decode(), err.decode()


@asynccontextmanager
async def tapped(url: str, run: str, out: Path) -> AsyncIterator[None]:
    """A tap in a process of its own, ready to see everything."""
    arguments = ["-m", "rlearner.audit.tap", "--broker", url, "--run", run, "--out", str(out)]
    child = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, stdout=asyncio.subprocess.PIPE, cwd=ROOT
    )
    assert child.stdout is not None
    assert await asyncio.wait_for(child.stdout.readline(), LONG_S) == b"ready\n"
    try:
        yield
    finally:
        child.terminate()
        assert await asyncio.wait_for(child.wait(), LONG_S) == 0


async def a_run(
    bus: Bus, url: str, config: dict[str, Any], tap_file: Path, stop_at: int = 5
) -> None:
    """To its end, with a stop in the middle."""
    stop = Stop()

    def answer(ticket: wire.Ticket) -> list[wire.Message | bytes]:
        if ticket.number == stop_at:
            stop.request("test")
        return eventful(ticket)

    async with tapped(url, bus.run, tap_file):
        for life, told in ((stop, answer), (Stop(), eventful)):
            async with fleet.Hub(bus, told), asyncio.timeout(120):
                await serve_learner(RunSettings.of_config(config), url, life, connect_deadline_s=60)


@pytest.mark.parametrize("keep", [True, False])
async def test_audit_of_a_real_run(
    bus: Bus, broker_url: str, run_name: str, tmp_path: Path, keep: bool
) -> None:
    # with checkpoints, the one that the second life resumed from is deleted on the way
    steps, every = (6, 1) if keep else (3, 0)
    config = fleet.config(
        str(tmp_path),
        run_name,
        train={"steps": steps, "max_staleness": 1},
        samples={"keep": keep},
        checkpoint={"every_steps": every},
    )
    tap_file = tmp_path / "tap.jsonl"
    await a_run(bus, broker_url, config, tap_file)
    where = (run_name, "--dir", str(tmp_path))
    # the folder names the broker
    code, out, err = await command("audit", *where, "--json", "--tap", str(tap_file))
    assert (code, err) == (0, ""), out
    report = json.loads(out)
    expected = {
        "tickets": 2 * steps + 2,
        "trained": 2 * steps,
        "filtered": 0,
        "dropped": 0,
        "dead": 2,
        "open": 0,
        "lost": 0,
        "trained_twice": 0,
        "ok": True,
    }
    assert {name: report[name] for name in expected} == expected
    assert report["problems"] == []
    assert f"tap: {2 * steps + 2} tickets and {2 * steps + 6} records seen" in report["notes"], (
        report["notes"]
    )
    assert any(note.startswith("the broker's log: ") for note in report["notes"])
    assert any(note.startswith("the archive: ") for note in report["notes"]) == keep
    if not keep:  # one record less in the broker's log: a gap
        # the first life trimmed what its checkpoint holds
        first, last = await bus.first_seq(SAMPLES), await bus.last_seq(SAMPLES)
        assert last - first > 1
        # a busy broker that answers late is asked again, and has no such message then
        with suppress(ApiError):
            await call_api(
                bus.link,
                f"STREAM.MSG.DELETE.{SAMPLES.stream_name(run_name)}",
                {"seq": first + 1, "no_erase": True},
            )
        code, out, _ = await command("audit", *where)
        assert code == 1
        assert f"PROBLEM: the broker's log: records {first + 1} are missing" in out
        assert "lost          0" in out  # what became of its ticket is known
        return
    _, path = archive_files(tmp_path / run_name / "samples")[0]
    whole = path.read_bytes()
    path.write_bytes(whole[: whole.index(b"RLS1", 4)] + whole)  # one record twice
    code, out, _ = await command("audit", *where, "--json")
    assert code == 1
    assert "is there twice" in json.loads(out)["problems"][0]


async def test_trace_and_status(bus: Bus, broker_url: str, run_name: str, tmp_path: Path) -> None:
    config = fleet.config(
        str(tmp_path), run_name, train={"steps": 2, "max_staleness": 1}, samples={"keep": True}
    )
    await a_run(bus, broker_url, config, tmp_path / "tap.jsonl", stop_at=3)
    where = ("--dir", str(tmp_path))
    code, out, err = await command("trace", run_name, "2", *where, "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert (found["ticket"], found["state"], found["step"], found["task_index"]) == (
        2,
        "trained",
        1,
        1,
    )
    assert (found["hub"], found["deliveries"], found["reward_hubs"]) == ("made-up", 1, [])
    assert (found["record"]["seq"], found["record"]["source"], found["duplicates"]) == (
        4,
        "the broker's log",
        [5],
    )
    assert found["record"]["stored_at"].startswith("20")
    assert found["step_time"].endswith("+00:00")
    span = {
        "start": 5,
        "end": 8,
        "server": "made-up",
        "policy_version": 0,
        "reward": 1.0,
        "valid": False,
        "finish_reason": "stop",
    }
    assert found["trajectories"][1]["spans"] == [span]
    assert found["trajectories"][1]["reward_parts"] == {"env": 1.0}
    code, out, _ = await command("trace", run_name, "3", *where)
    assert code == 0
    assert "ticket 3: dead, env_error" in out
    assert "closed by   made-up: it broke" in out
    code, out, err = await command("trace", run_name, "99", *where)
    assert (code, err) == (2, f"error: run {run_name} has no ticket 99; its tickets are 1-6\n")
    await bus.trim(SAMPLES, 10_000)
    code, out, _ = await command("trace", str(tmp_path / run_name), "2", *where)
    assert "record      4, the archive" in out
    here = wire.Presence(
        role="envhub",
        id="hub-7",
        host="here",
        pid=1,
        state="serving",
        slots=4,
        running=1,
        serves=["lake"],
    )
    announcer = Announcer(bus, lambda: here)
    await announcer.start()
    code, out, err = await command("status", run_name, *where, "--json")
    assert (code, err) == (0, "")
    status = json.loads(out)
    assert (status["step"], status["steps"], status["epoch"], status["desired"]) == (
        2,
        2,
        2,
        "stopped",
    )
    assert status["tickets"] == {
        "issued": 6,
        "trained": 4,
        "filtered": 0,
        "dropped": 0,
        "dead": 2,
        "open": 0,
        "duplicate": 2,
    }
    assert [
        (one["role"], one["id"], one["running"], one["slots"]) for one in status["processes"]
    ] == [("envhub", "hub-7", 1, 4)]
    assert (status["weights"]["epoch"], status["weights"]["version"]) == (2, 2)
    assert status["queues"]["samples"]["kept"] == 0
    code, out, _ = await command("status", run_name, *where)
    assert f"run {run_name}: step 2 of 2" in out
    assert "envhub hub-7                 serving   1/4 running" in out
    await announcer.close()
    code, out, err = await command(
        "status", run_name, *where, "--broker", "nats://127.0.0.1:1", "--connect-deadline", "0.5"
    )
    assert code == 2  # a broker that the user named must answer
    assert err.startswith("error: ")
    (tmp_path / run_name / "broker.url").write_text("nats://127.0.0.1:1\n")
    code, out, _ = await command("status", run_name, *where, "--connect-deadline", "0.5")
    assert code == 0
    assert "broker       no broker answered at nats://127.0.0.1:1" in out


async def test_a_closed_pipe_ends_a_command_without_a_word(
    bus: Bus, broker_url: str, run_name: str, tmp_path: Path
) -> None:
    """Into `head`, which has left: with output written as it comes, and with output written at the
    end.
    """
    config = fleet.config(
        str(tmp_path), run_name, train={"steps": 1, "max_staleness": 0}, samples={"keep": True}
    )
    async with fleet.Hub(bus, eventful), asyncio.timeout(120):
        await serve_learner(
            RunSettings.of_config(config), broker_url, Stop(), connect_deadline_s=60
        )
    run = (run_name, "--dir", str(tmp_path))
    file = str(tmp_path / run_name / "config.yaml")
    commands = [
        ("status", *run),
        ("audit", *run),
        ("trace", run_name, "1", *run[1:]),
        ("show", run_name, "2", *run[1:]),
        ("replay", *run, "--from", "0", "--to", "1"),
        ("doctor",),
        ("check", file),
    ]
    for number, arguments in enumerate(commands):
        read, write = os.pipe()
        os.close(read)
        environment = {**os.environ, "PYTHONUNBUFFERED": "1" if number % 2 else ""}
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "rlearner.cli",
            *arguments,
            stdout=write,
            stderr=asyncio.subprocess.PIPE,
            env=environment,
        )
        os.close(write)
        _, err = await asyncio.wait_for(child.communicate(), LONG_S)
        assert b"BrokenPipeError" not in err, arguments
        assert b"Traceback" not in err, arguments
        assert child.returncode == 141, (arguments, err)


async def test_pause_resume_drain_stop(
    bus: Bus, broker_url: str, run_name: str, tmp_path: Path
) -> None:
    config = fleet.config(str(tmp_path), run_name)
    pausing = asyncio.Event()

    def answer(ticket: wire.Ticket) -> list[wire.Message | bytes]:
        pausing.set()
        return []  # it goes on until it is told to stop

    async def desired() -> wire.Message:
        found = await bus.key_value(CONTROL).get(run_name)
        assert found is not None
        return found[0]

    async with fleet.Hub(bus, answer), asyncio.timeout(120):
        learning = asyncio.create_task(
            serve_learner(RunSettings.of_config(config), broker_url, Stop(), connect_deadline_s=60)
        )
        await pausing.wait()
        where = (run_name, "--dir", str(tmp_path))
        assert await command("pause", *where, "--reason", "look at it") == (
            0,
            f"{run_name}: paused\n",
            "",
        )
        assert await desired() == wire.DesiredState(state="paused", reason="look at it")
        code, out, _ = await command("resume", *where, "--broker", broker_url)
        assert (code, out) == (0, f"{run_name}: running\n")
        assert not learning.done()
        assert (await command("stop", *where))[:2] == (0, f"{run_name}: stopped\n")
        await learning
    # from a machine without the folder
    code, _, err = await command("drain", run_name, "--broker", broker_url)
    assert code == 2
    assert f"run {run_name} is stopped, so it cannot be draining" in err
    assert (await command("stop", run_name, "--broker", broker_url))[0] == 0
    assert await desired() == wire.DesiredState(state="stopped")
    code, _, err = await command("stop", "no-such-run", "--broker", broker_url)
    assert code == 2
    assert "no run 'no-such-run'" in err


@asynccontextmanager
async def announced(bus: Bus, *present: wire.Presence) -> AsyncIterator[None]:
    """These processes are there."""
    announcers = [Announcer(bus, lambda one=one: one) for one in present]  # type: ignore[misc]
    for one in announcers:
        await one.start()
    try:
        yield
    finally:
        for one in announcers:
            await one.close()


def relative(path: Path) -> str:
    return os.path.relpath(path)


async def test_status_says_first_that_no_learner_is_running_and_how_to_start_it(
    bus: Bus, broker_url: str, run_name: str, tmp_path: Path
) -> None:
    config = fleet.config(str(tmp_path), run_name, train={"steps": 9})
    where = (run_name, "--dir", str(tmp_path))
    file = relative(tmp_path / run_name / "config.yaml")
    stop = Stop()

    def answer(ticket: wire.Ticket) -> list[wire.Message | bytes]:
        stopping.set()
        return []  # so that the run goes on

    stopping = asyncio.Event()
    async with fleet.Hub(bus, answer), asyncio.timeout(120):
        learning = asyncio.create_task(
            serve_learner(RunSettings.of_config(config), broker_url, stop, connect_deadline_s=60)
        )
        await stopping.wait()
        _, out, _ = await command("status", *where, "--json")
        assert json.loads(out)["learner"] == "running"
        assert (await command("status", *where))[1].startswith(f"run {run_name}: step ")
        stop.request("test")
        await learning
    code, out, _ = await command("status", *where)
    assert code == 0
    assert (
        out.splitlines()[0]
        == f"no learner is running; start it again: rlearner start {file} --broker {broker_url}"
    )
    (tmp_path / run_name / "broker.url").write_text("nats://127.0.0.1:1\n")
    code, out, _ = await command("status", *where, "--connect-deadline", "0.5")
    assert code == 0
    first = f"no learner was found, because its broker was not: `rlearner up {file}` continues the run where it stopped"
    assert out.splitlines()[0] == first


async def test_status_of_a_run_that_its_broker_does_not_have(
    bus: Bus, broker_url: str, run_name: str, tmp_path: Path
) -> None:
    """Its first learner makes the first weights, or the broker has lost its store."""
    file = tmp_path / run_name / "config.yaml"
    file.parent.mkdir()
    file.write_text(to_yaml(fleet.config(str(tmp_path), run_name)))
    relative = os.path.relpath(file)  # noqa: ASYNC240
    where = (run_name, "--dir", str(tmp_path), "--broker", broker_url)
    async with announced(
        bus, wire.Presence(role="learner", id="learner", host="h", pid=1, state="starting")
    ):
        _, out, _ = await command("status", *where)
    assert out.splitlines()[0] == f"run {run_name}: step 0 of 3"
    assert (
        f"the learner is starting: the broker at {broker_url} sees its learner, which has not taken the run yet"
        in out
    )
    _, out, _ = await command("status", *where)
    start = f"`rlearner start {relative} --broker URL`"
    assert out.splitlines()[0] == (
        f"no learner was found: {start} continues the run with its broker; "
        "--broker names another one to this command"
    )


async def test_status_asks_the_broker_of_the_run(
    bus: Bus, broker_url: str, run_name: str, tmp_path: Path
) -> None:
    """Not that of the variable, which a shell keeps while its user looks at other runs."""
    file = tmp_path / run_name / "config.yaml"
    file.parent.mkdir()
    file.write_text(to_yaml(fleet.config(str(tmp_path), run_name)))
    note_broker(file.parent, broker_url)
    spec = wire.RunSpec(
        run=run_name, wire_version=wire.WIRE_VERSION, epoch=1, config={}, model_path=""
    )
    await bus.key_value(RUNS).put(run_name, spec)
    variable = {"RL_BROKER": "nats://127.0.0.1:9"}
    status = (run_name, "--dir", str(tmp_path), "--json", "--connect-deadline", "20")
    code, out, err = await command("status", *status, **variable)
    assert (code, json.loads(out)["broker"]) == (0, broker_url), err
    code, _, err = await command("status", *status[:-1], "0.2", "--broker", variable["RL_BROKER"])
    assert (code, "no broker answered at nats://127.0.0.1:9" in err) == (2, True)


async def test_drain_says_who_ends_and_who_stays_and_why(
    bus: Bus, broker_url: str, run_name: str, tmp_path: Path
) -> None:
    spec = wire.RunSpec(
        run=run_name, wire_version=wire.WIRE_VERSION, epoch=1, config={}, model_path=""
    )
    await bus.key_value(RUNS).put(run_name, spec)
    there = [
        wire.Presence(role="envhub", id="e1", host="h", pid=1, state="serving", slots=8, running=3),
        wire.Presence(role="rollout", id="r1", host="h", pid=2, state="serving"),
    ]
    async with announced(bus, *there):
        where = (run_name, "--dir", str(tmp_path), "--broker", broker_url)
        code, out, _ = await command("drain", *where)
        _, plain, _ = await command("drain", *where, "--reason", "a new disk", "--json")
    found = json.loads(plain)
    assert (found["run"], found["state"], found["reason"]) == (run_name, "draining", "a new disk")
    assert [(one["role"], one["id"], one["does"][:6]) for one in found["processes"]] == [
        ("envhub", "e1", "starts"),
        ("rollout", "r1", "stays,"),
    ]
    assert (code, out.splitlines()) == (
        0,
        [
            f"{run_name}: draining",
            "  envhub e1: starts no new episodes, finishes the running ones (3 of 8 slots), then exits",
            f"  rollout r1: stays, because hubs still need it and the run may continue; `rlearner stop {run_name}` "
            f"stops it",
        ],
    )


async def test_logs_of_a_fleet_tell_its_last_warnings_and_where_the_logs_are(
    bus: Bus, broker_url: str, run_name: str, tmp_path: Path
) -> None:
    spec = wire.RunSpec(
        run=run_name, wire_version=wire.WIRE_VERSION, epoch=1, config={}, model_path=""
    )
    await bus.key_value(RUNS).put(run_name, spec)
    (tmp_path / run_name).mkdir()
    (tmp_path / run_name / "config.yaml").write_text(to_yaml({"run": {"name": run_name}}))
    here = socket.gethostname()
    there = [
        wire.Presence(
            role="envhub",
            id="e1",
            host="gen1",
            pid=4711,
            state="serving",
            said="12:00 WARNING slow disk",
        ),
        wire.Presence(role="rollout", id="r1", host=here, pid=os.getpid(), state="serving"),
    ]
    where = ("logs", run_name, "--dir", str(tmp_path), "--broker", broker_url)
    async with announced(bus, *there):
        code, out, _ = await command(*where)
        _, plain, _ = await command(*where, "r1", "--json")
        missing, _, err = await command(*where, "rewardhub")
    lines = out.splitlines()
    assert code == 0
    assert lines[:2] == [
        "envhub e1 on gen1 (pid 4711), serving: 12:00 WARNING slow disk",
        "  its log: on gen1: journalctl _PID=4711 -f; under Slurm the file of the job's --output",
    ]
    assert (
        lines[2]
        == f"rollout r1 on {here} (pid {os.getpid()}), serving: no warning in the last 10 minutes"
    )
    behind = os.readlink("/proc/self/fd/2")
    found = json.loads(plain)
    assert (found["id"], found["said"]) == ("r1", "")
    # pytest's own file, unless it does not capture
    assert not behind.startswith("/tmp") or found["log"] == behind
    assert missing == 2
    assert f"run {run_name} has no process rewardhub on the broker" in err
