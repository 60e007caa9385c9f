"""What a service manager hears from real processes, over a real datagram socket."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import statistics
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from broker.runtime.service_manager import ServiceManager

HEAD = """
import asyncio, os, subprocess, sys, time
from broker.errors import UserError
from broker.runtime.process import main
"""


class Manager:
    """A socket as systemd makes it, and what came through it."""

    def __init__(self, address: str) -> None:
        self.address, self.lines, self.at = address, list[str](), list[float]()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind("\0" + address[1:] if address.startswith("@") else address)

    def until(self, seen: Callable[[str], bool], within_s: float = 30.0) -> str:
        until = time.monotonic() + within_s
        while True:
            self._socket.settimeout(max(0.001, until - time.monotonic()))
            lines = self._socket.recv(65536).decode().split("\n")
            self.lines += lines
            self.at += [time.monotonic()] * len(lines)
            if found := next(filter(seen, lines), ""):
                return found

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    made = Manager(str(tmp_path / "notify"))
    yield made
    made.close()


def start(manager: Manager, body: str, **environ: str) -> subprocess.Popen[str]:
    script = HEAD + textwrap.dedent(body) + "\nsys.exit(main('envhub', body))\n"
    told = {**os.environ, "NOTIFY_SOCKET": manager.address, **environ}
    return subprocess.Popen(
        [sys.executable, "-c", script],
        env=told,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("address", ["path", "abstract"])
def test_a_manager_hears_readiness_status_and_the_drain(address: str, tmp_path: Path) -> None:
    manager = Manager(
        str(tmp_path / "notify") if address == "path" else f"@rlearner-test-{os.getpid()}"
    )
    with start(
        manager,
        """
        async def body(stop):
            stop.health.set("starting", "waiting for a broker")
            await asyncio.sleep(0.1)
            stop.health.joined()
            stop.health.set("ready", "run lake: step 3\\nMAINPID=1")
            await stop.asked.wait()
            await asyncio.sleep(0.1)
        """,
    ) as child:
        manager.until(lambda line: line == "READY=1")
        before = list(manager.lines)
        manager.until(lambda line: line.startswith("STATUS=run lake"))
        child.send_signal(signal.SIGTERM)
        manager.until(lambda line: line == "STOPPING=1")
        stopping = manager.lines[manager.lines.index("STOPPING=1") :]
        assert child.wait(30) == 0
    manager.close()
    # while it starts
    assert before[:2] == ["STATUS=waiting for a broker", "EXTEND_TIMEOUT_USEC=60000000"]
    assert stopping == ["STOPPING=1", "STATUS=stopping: SIGTERM", "EXTEND_TIMEOUT_USEC=60000000"]
    assert "STATUS=run lake: step 3 MAINPID=1" in manager.lines  # one line, not a second assignment
    assert manager.lines.count("READY=1") == manager.lines.count("STOPPING=1") == 1
    assert "WATCHDOG=1" not in manager.lines


def test_a_user_error_is_the_last_status(manager: Manager) -> None:
    with start(manager, "async def body(stop): raise UserError('port 4222 is taken')") as child:
        manager.until(lambda line: line == "STATUS=UserError: port 4222 is taken")
        assert child.wait(30) == 2
    assert "READY=1" not in manager.lines


def test_the_watchdog_is_fed_at_half_its_time_and_not_by_a_blocked_loop(manager: Manager) -> None:
    body = """
        async def body(stop):
            stop.health.set("ready", "works")
            await asyncio.sleep(1.2)
            print(time.monotonic(), flush=True)
            time.sleep(60)
    """
    with start(manager, body, WATCHDOG_USEC="400000") as child:
        manager.until(lambda line: line == "READY=1")
        with pytest.raises(TimeoutError):
            manager.until(lambda line: False, within_s=2.5)
        child.send_signal(signal.SIGABRT)  # as systemd does
        out, err = child.communicate(timeout=30)
    fed = [at for line, at in zip(manager.lines, manager.at, strict=True) if line == "WATCHDOG=1"]
    gaps = [after - before for before, after in itertools.pairwise(fed)]
    assert 3 <= len(fed) <= 8  # in 1.2 seconds, every 0.2 s
    assert 0.15 < statistics.median(gaps) < 0.3
    assert max(fed) < float(out) + 0.1
    assert child.returncode == -signal.SIGABRT
    assert 'File "<string>", line' in err  # the stacks of its threads


def test_no_child_may_speak_for_the_process(manager: Manager) -> None:
    body = """
        async def body(stop):
            script = "import os; print(sorted({'NOTIFY_SOCKET', 'WATCHDOG_USEC', 'WATCHDOG_PID'} & set(os.environ)))"
            subprocess.run([sys.executable, "-c", script])
    """
    with start(manager, body, WATCHDOG_USEC="5000000", WATCHDOG_PID="1") as child:
        out, _ = child.communicate(timeout=30)
    assert out == "[]\n"


def test_a_watchdog_for_another_process_is_left_alone() -> None:
    environ = {
        "NOTIFY_SOCKET": "@x",
        "WATCHDOG_USEC": "5000000",
        "WATCHDOG_PID": "1",
        "OTHER": "stays",
    }
    manager = ServiceManager.take(environ)
    assert manager is not None
    assert manager.watchdog_s is None
    assert environ == {"OTHER": "stays"}
    own = ServiceManager.take(
        {"NOTIFY_SOCKET": "@x", "WATCHDOG_USEC": "5000000", "WATCHDOG_PID": str(os.getpid())}
    )
    assert own is not None
    assert own.watchdog_s == 5.0


def test_a_manager_that_is_gone_costs_one_warning(tmp_path: Path) -> None:
    script = f"{HEAD}\nasync def body(stop):\n    await asyncio.sleep(1.2)\nsys.exit(main('envhub', body))"
    environ = {**os.environ, "NOTIFY_SOCKET": str(tmp_path / "none")}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environ, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0
    assert done.stderr.count("does not listen: No such file or directory") == 1
    assert len(done.stderr.splitlines()) == 1
