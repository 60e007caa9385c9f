"""Exit codes, signals and log lines of a process, as its parent sees them."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

from broker.system import logs

HEAD = """
import asyncio, sys, time
from broker.errors import ConfigError, NodesMissing, UserError
from broker.runtime.process import Stop, Stopped, main
def say(text): print(text, flush=True)
"""


def start(body: str) -> subprocess.Popen[str]:
    script = HEAD + textwrap.dedent(body) + "\nsys.exit(main('envhub', body))\n"
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(body: str) -> tuple[int, str, str]:
    with start(body) as child:
        out, err = child.communicate(timeout=60)
    return child.returncode, out, err


def test_cycles_are_looked_for_rarely_and_still_found() -> None:
    code, out, err = finish("""
        import gc, weakref
        class Cycle:
            def __init__(self): self.own = self
        async def body(stop):
            collected = []
            weakref.finalize(Cycle(), collected.append, 1)
            kept = [[] for _ in range(49_000 - gc.get_count()[0])]
            say(len(collected))
            kept += [[] for _ in range(2_000)]
            say(len(collected))
    """)
    assert (code, out, err) == (0, "0\n1\n", "")


def test_a_body_that_returns_ends_with_zero_on_uvloop() -> None:
    code, out, err = finish("""
        async def body(stop):
            say(type(asyncio.get_running_loop()).__module__)
    """)
    assert (code, out, err) == (0, "uvloop\n", "")


def test_a_user_error_is_one_line_and_exit_code_2() -> None:
    code, _, err = finish("""
        async def body(stop):
            raise ConfigError("train.lr", -1, "input should be\\ngreater than 0")
    """)
    assert (code, err) == (
        2,
        "error: train.lr: -1 is not allowed; input should be greater than 0\n",
    )


def test_missing_nodes_are_one_line_and_exit_code_1_for_a_supervisor() -> None:
    code, _, err = finish("""
        async def body(stop):
            raise NodesMissing("not all nodes came within 8 s; here: node 0 (a); missing: node 1")
    """)
    assert (code, err) == (
        1,
        "error: not all nodes came within 8 s; here: node 0 (a); missing: node 1\n",
    )


def test_a_user_error_out_of_a_task_group_too() -> None:
    code, _, err = finish("""
        async def fail():
            raise UserError("port 4222 is taken")
        async def body(stop):
            async with asyncio.TaskGroup() as group:
                group.create_task(asyncio.sleep(9))
                group.create_task(fail())
    """)
    assert (code, err) == (2, "error: port 4222 is taken\n")


def test_anything_else_is_a_traceback_and_exit_code_1() -> None:
    code, _, err = finish("""
        async def body(stop):
            raise KeyError("x")
    """)
    assert code == 1
    assert "ERROR - envhub - KeyError: 'x'" in err
    assert "Traceback" in err


def test_stopped_before_it_began_ends_with_zero() -> None:
    code, _, err = finish("""
        async def body(stop):
            raise Stopped("SIGTERM")
    """)
    assert (code, err) == (0, "")


def test_the_exit_code_is_what_the_body_returns_or_what_a_stop_stands_for() -> None:
    code, _, err = finish("""
        async def body(stop):
            return 7
    """)
    assert (code, err) == (7, "")
    code, _, err = finish("""
        async def body(stop):
            raise Stopped("SIGTERM")
        sys.exit(main("operator", body, stopped_code=130))
    """)
    assert (code, err) == (130, "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_asks_for_a_drain(number: signal.Signals) -> None:
    with start("""
        async def body(stop):
            say("up")
            await stop.asked.wait()
            say(stop.reason)
            await asyncio.sleep(0.2)
            say("drained")
    """) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "up\n"
        child.send_signal(number)
        out, err = child.communicate(timeout=60)
    assert (child.returncode, out) == (0, f"{number.name}\ndrained\n")
    assert f"INFO - envhub - stopping: {number.name}" in err


def test_a_second_signal_ends_it_at_once_even_when_the_loop_is_busy() -> None:
    with start("""
        async def body(stop):
            say("up")
            await stop.asked.wait()
            say("draining")
            end = time.monotonic() + 30
            while time.monotonic() < end:
                pass
    """) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "up\n"
        child.send_signal(signal.SIGTERM)
        assert child.stdout.readline() == "draining\n"
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=60)
    assert child.returncode == 130
    assert "second signal" in err


@pytest.fixture
def identity() -> Iterator[None]:
    before = dict(logs._identity)
    yield
    logs._identity.update(before)


@pytest.mark.usefixtures("identity")
def test_a_log_line_names_run_role_and_id() -> None:
    logs.identify(run="demo", role="envhub", process_id="e1")
    logs.identify(run=None, role="rollout")
    record = logging.LogRecord("x", logging.WARNING, "f", 1, "two %s\nlines", ("short",), None)
    record.ticket = 7
    day, time, rest = logs.LineFormatter().format(record).split(" ", 2)
    assert rest == "WARNING demo rollout e1 two short lines ticket=7"
    assert datetime.strptime(f"{day} {time}", "%Y-%m-%d %H:%M:%S.%f").timestamp() == pytest.approx(
        record.created, abs=0.001
    )


def envhub(*arguments: str) -> subprocess.CompletedProcess[str]:
    line = [
        sys.executable,
        "-m",
        "envhub.cli",
        "--broker",
        "nats://127.0.0.1:9",
        "--connect-deadline",
        "0.3",
        *arguments,
    ]
    return subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)


def test_a_log_file_gets_what_stderr_gets_and_is_appended_to(tmp_path: Path) -> None:
    file = tmp_path / "hub.log"
    file.write_text("an earlier life\n")
    done = envhub("--log-file", str(file), "--id", "e1")
    assert done.returncode == 2
    *said, last = done.stderr.splitlines()
    assert last.startswith("error: ")
    assert any(" WARNING - envhub e1 no broker at " in line for line in said)
    earlier, *lines, written = file.read_text().splitlines()
    assert (earlier, lines) == ("an earlier life", said)
    assert written.endswith(f" ERROR - envhub e1 {last.removeprefix('error: ')}")


def test_a_log_file_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    done = envhub("--log-file", str(tmp_path / "none" / "hub.log"))
    assert done.returncode == 2
    assert (
        done.stderr
        == f"error: --log-file: cannot write {tmp_path}/none/hub.log: No such file or directory; name a file in a "
        f"folder that exists\n"
    )
