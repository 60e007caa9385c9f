"""Limits on a process's own clock: sleeping and computing pass its time, waiting for the machine does
not.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

import pytest
from waits import LONG_S, runs, until

from rlearner_workers.patience import OutOfTime, answer_within, output_within, wait_for_bytes

SPIN = "import time\nend = time.process_time() + {cpu_s}\nwhile time.process_time() < end: pass\n"
LIMIT_S = 1.0


@contextlib.contextmanager
def one_processor(programs: Sequence[str], niceness: int = 0) -> Iterator[list[int]]:
    """Run Python programs on one processor; they end by themselves."""
    core = str(min(os.sched_getaffinity(0)))
    command = ["taskset", "-c", core, "nice", "-n", str(niceness), sys.executable, "-S", "-c"]
    children = [subprocess.Popen([*command, program]) for program in programs]
    try:
        yield [child.pid for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()


async def exit_of(pid: int) -> int:
    await until(lambda: not runs(pid), 100 * LONG_S)
    return pid


@pytest.mark.parametrize("program", ["import time; time.sleep(60)", SPIN.format(cpu_s=60)])
async def test_sleeping_and_computing_reach_the_limit(program: str) -> None:
    text = r"^no answer in \d+ s, in which it used [\d.]+ s of processor time \(the load is"
    with one_processor([program]) as (pid,), pytest.raises(OutOfTime, match=text):
        await answer_within(exit_of(pid), pid, LIMIT_S)


async def test_a_starved_process_keeps_its_time() -> None:
    burners = [SPIN.format(cpu_s=60)] * 4
    with one_processor(burners), one_processor([SPIN.format(cpu_s=0.4)], niceness=5) as (pid,):
        began = time.monotonic()
        assert await answer_within(exit_of(pid), pid, LIMIT_S) == pid
        assert time.monotonic() - began > LIMIT_S  # a limit on the wall clock would have ended it


async def test_the_works_own_error_and_a_cancellation_pass() -> None:
    async def fail() -> None:
        raise KeyError("its own")

    with pytest.raises(KeyError, match="its own"):
        await answer_within(fail(), os.getpid(), LONG_S)
    task = asyncio.create_task(answer_within(asyncio.sleep(LONG_S), os.getpid(), LONG_S))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_waiting_for_bytes(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlearner_workers.patience.SLOW_AFTER_S", 0.2)
    ours, theirs = socket.socketpair()
    with ours, theirs, one_processor(["import time; time.sleep(60)"]) as (pid,):
        with pytest.raises(OutOfTime, match="no answer in"):
            wait_for_bytes(ours, pid, 0.5, "importing environment lake")
        assert "importing environment lake is slow: no answer in" in caplog.text
        theirs.send(b"x")
        wait_for_bytes(ours, pid, 0.5)


@pytest.mark.parametrize(
    ("program", "output"), [("print('done')", "done\n"), ("import time; time.sleep(60)", None)]
)
def test_output_of_a_process(program: str, output: str | None) -> None:
    with subprocess.Popen(
        [sys.executable, "-S", "-c", program], stdout=subprocess.PIPE, text=True
    ) as child:
        if output is not None:
            assert output_within(child, LONG_S) == output
            return
        with pytest.raises(OutOfTime, match="no answer in"):
            output_within(child, 0.5)
        assert child.returncode == -9
