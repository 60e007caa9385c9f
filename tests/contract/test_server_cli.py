"""The command ``broker`` as an operator uses it: real processes against a real nats-server."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
from base64 import b64encode
from pathlib import Path

import psutil
import pytest

from broker import cli
from broker.contract import codec, wire
from broker.contract.examples import EXAMPLES
from broker.contract.streams import CONTROL, EPISODES, RUNS, SAMPLES, TICKETS
from broker.errors import UserError
from broker.jetstream.bus import Bus
from broker.runtime.announce import Announcer


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "broker.cli", *arguments]


def broker(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RL_")}
    return subprocess.run(
        command(*arguments),
        capture_output=True,
        text=True,
        timeout=120,
        env=clean | env,
        check=False,
    )


@pytest.fixture
async def run(bus: Bus) -> Bus:
    """A run that has published its RunSpec."""
    await bus.key_value(RUNS).put(
        bus.run, wire.RunSpec(run=bus.run, wire_version=1, epoch=1, config={}, model_path="m")
    )
    return bus


def fails(result: subprocess.CompletedProcess[str], pattern: str) -> None:
    """One clear line, exit code 2, no traceback."""
    assert result.returncode == 2, result.stderr
    last = result.stderr.strip().splitlines()[-1]
    assert re.search(pattern, last), result.stderr
    assert last.startswith("error: ")
    assert "Traceback" not in result.stderr


# --------------------------------------------------------------------------------------------------------
# serve


def test_serve_runs_until_it_is_stopped(tmp_path: Path) -> None:
    with subprocess.Popen(
        command("serve", "--port", "0", "--store", str(tmp_path)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.match(r"broker at nats://127\.0\.0\.1:(\d+), store ", line)
        assert found, line
        (child,) = psutil.Process(process.pid).children()
        with socket.create_connection(("127.0.0.1", int(found[1])), 5) as connection:
            assert connection.recv(5) == b"INFO "
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    assert not psutil.pid_exists(child.pid)


def test_serve_killed_takes_the_server_along(tmp_path: Path) -> None:
    with subprocess.Popen(
        command("serve", "--port", "0", "--store", str(tmp_path)),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        (child,) = psutil.Process(process.pid).children()
        process.kill()
        process.wait()
    assert psutil.wait_procs([child], timeout=60)[1] == []


def test_serve_says_when_the_server_ends_by_itself(tmp_path: Path) -> None:
    with subprocess.Popen(
        command("serve", "--port", "0", "--store", str(tmp_path)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        (child,) = psutil.Process(process.pid).children()
        child.kill()
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 1  # so that a service manager starts it again
    assert re.search(
        r"^error: nats-server exited unexpectedly, see .*nats-server\.log$", errors, re.MULTILINE
    )


def test_serve_refuses_a_taken_port_and_other_addresses(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        fails(
            broker("serve", "--port", port, "--store", str(tmp_path)),
            f"port {port} on 127.0.0.1 is already in use",
        )
    fails(
        broker("serve", "--bind", "0.0.0.0", "--store", str(tmp_path)),
        r"--bind: '0\.0\.0\.0' is not allowed; one address of this host",
    )
    result = broker("serve", "--port", "70000")
    assert result.returncode == 2
    assert "'70000' is not a port; use 0 to 65535" in result.stderr


# -----------------------------------------------------------------------------------------------
# status, control


async def test_status_shows_runs_processes_and_depths(run: Bus, broker_url: str) -> None:
    there = [
        wire.Presence(role=role, id=f"{role}-1", host="h", pid=1, state="serving")
        for role in ("rollout", "envhub")
    ]
    announcers = [Announcer(run, lambda one=one: one) for one in there]  # type: ignore[misc]
    for announcer in announcers:
        await announcer.start()
    for _ in range(3):
        await run.publish(TICKETS, EXAMPLES[wire.Ticket], key="lake")
    await run.publish(EPISODES, EXAMPLES[wire.Group], key="judge")
    for _ in range(4):
        await run.publish(SAMPLES, EXAMPLES[wire.Closed])
    await run.trim(SAMPLES, 3)
    where = ("status", "--broker", broker_url, "--run", run.run)
    result = await asyncio.to_thread(broker, *where)
    plain = json.loads((await asyncio.to_thread(broker, *where, "--json")).stdout)
    for announcer in announcers:
        await announcer.close()
    assert result.returncode == 0, result.stderr
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert lines[1] == f"{run.run}: running; 1 envhub, 1 rollout"
    assert {
        "tickets lake 3",
        "episodes judge 1",
        "samples 2 kept, 4 written",
        "dead 0 kept, 0 written",
    } <= set(lines)
    (found,) = plain["runs"]
    assert (found["run"], found["state"]) == (run.run, "running")
    assert found["processes"] == {"envhub": 1, "rollout": 1}
    assert found["streams"]["tickets"] == {"lake": 3}
    assert found["streams"]["samples"] == {"kept": 2, "written": 4}


async def test_control_tells_the_run(run: Bus, broker_url: str) -> None:
    result = broker(
        "control", "paused", "--reason", "new disk", "--broker", broker_url, "--run", run.run
    )
    assert (result.returncode, result.stdout) == (0, f"{run.run}: paused\n")
    found = await run.key_value(CONTROL).get(run.run)
    assert found is not None
    assert found[0] == wire.DesiredState(state="paused", reason="new disk")
    again = broker("control", "paused", "--json", "--broker", broker_url, "--run", run.run)
    assert json.loads(again.stdout) == {"run": run.run, "state": "paused", "reason": ""}
    assert f"{run.run}: paused" in broker("status", RL_BROKER=broker_url, RL_RUN=run.run).stdout


async def test_runs_that_cannot_be_told(run: Bus, broker_url: str) -> None:
    fails(
        broker("dead", "list", "--broker", broker_url, "--run", "nope"),
        "no run 'nope' on the broker; there is .*",
    )
    gone = broker("status", "--broker", "nats://127.0.0.1:9", "--connect-deadline", "0.5")
    fails(gone, r"no broker answered at nats://127\.0\.0\.1:9")
    assert gone.stderr.count("\n") == 1


# -------------------------------------------------------------------------------------------------
# dead letters


async def test_dead_letters_are_listed_shown_and_purged(
    run: Bus,
    broker_url: str,
    capfdbinary: pytest.CaptureFixture[bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RL_BROKER", broker_url)
    monkeypatch.setenv("RL_RUN", run.run)

    async def dead(*arguments: str) -> str:
        await cli.operate(cli.parser().parse_args(["dead", *arguments]))
        return capfdbinary.readouterr().out.decode()

    assert await dead("list") == ""
    await run.dead_letter(
        SAMPLES, seq=17, ticket=4, reason="Group: unknown field `x`", data=b"\x81\xa1x\x01"
    )
    await run.dead_letter(EPISODES, seq=0, ticket=0, reason="bad\x1b[2J", data=b"\xc1\x00")
    whole = codec.encode(EXAMPLES[wire.Ticket])
    await run.dead_letter(TICKETS, seq=1, ticket=9, reason="odd", data=whole)
    assert (await dead("list")).splitlines() == [
        f"1  samples 17, ticket 4, 4 bytes, by {run.name}: Group: unknown field `x`",
        f"2  episodes, 2 bytes, by {run.name}: bad\\x1b[2J",
        f"3  tickets 1, ticket 9, {len(whole)} bytes, by {run.name}: odd",
    ]
    shown = await dead("show", "1")
    assert "reason    Group: unknown field `x`" in shown
    assert shown.endswith('{"x": 1}\n')
    assert (await dead("show", "2")).endswith("bytes: c1 00\n")
    assert "message   Ticket\nnumber    417\ndomain    lake\n" in await dead("show", "3")
    group = codec.encode(EXAMPLES[wire.Group])
    await run.dead_letter(EPISODES, seq=2, ticket=417, reason="hub died", data=group)
    shown = await dead("show", "4")
    assert "\ntokens    tokens are shown by their numbers: " in shown
    assert "  prompt\n    | Reach the goal.\n" in shown
    assert "  answer 1, " in shown
    assert "Column" not in shown
    await cli.operate(cli.parser().parse_args(["dead", "show", "1", "--raw"]))
    assert capfdbinary.readouterr().out == b"\x81\xa1x\x01"
    with pytest.raises(UserError, match="no dead letter 8 in run"):
        await dead("show", "8")
    listed = json.loads(await dead("list", "--json"))
    numbers = [one["number"] for one in listed["letters"]]
    assert (listed["run"], numbers) == (run.run, [1, 2, 3, 4])
    second = {
        "number": 2,
        "stream": "episodes",
        "sequence": 0,
        "ticket": 0,
        "by": run.name,
        "bytes": 2,
    }
    assert listed["letters"][1] == {**second, "reason": "bad\x1b[2J"}
    assert json.loads(await dead("show", "2", "--json"))["data"] == b64encode(b"\xc1\x00").decode()
    third = json.loads(await dead("show", "3", "--json"))
    assert (third["type"], third["message"]["number"], third["message"]["domain"]) == (
        "Ticket",
        417,
        "lake",
    )
    assert await dead("purge", "--through", "1") == f"1 dead letters deleted from run {run.run}\n"
    assert [line[0] for line in (await dead("list")).splitlines()] == ["2", "3", "4"]
    assert json.loads(await dead("purge", "--json")) == {"run": run.run, "deleted": 3}
    assert await dead("list") == ""


async def test_the_command_lists_dead_letters(run: Bus, broker_url: str) -> None:
    await run.dead_letter(SAMPLES, seq=17, ticket=4, reason="odd", data=b"x")
    result = broker("dead", "list", "--broker", broker_url, "--run", run.run)
    assert (result.returncode, result.stdout) == (
        0,
        f"1  samples 17, ticket 4, 1 bytes, by {run.name}: odd\n",
    )
    assert result.stderr.endswith(f"1 dead letter in run {run.run}\n")


async def test_a_stopped_run_stays_stopped_until_its_learner_starts_again(
    run: Bus, broker_url: str
) -> None:
    where = ("--broker", broker_url, "--run", run.run)
    assert broker("control", "stopped", "--reason", "all steps are done", *where).returncode == 0
    for state in ("paused", "running", "draining"):
        fails(
            broker("control", state, *where),
            rf"run {run.run} is stopped \(all steps are done\), so it cannot be {state}; start its learner again",
        )
    assert broker("control", "stopped", *where).returncode == 0
