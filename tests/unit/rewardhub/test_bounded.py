"""A function in a process of its own: what is too costly ends there, and the next call goes to a
fresh process.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time

import pytest
from waits import runs, until

from rewardhub.bounded import BoundedFunction, TooCostly


def work(data: bytes) -> bytes:
    match data:
        case b"pid":
            return str(os.getpid()).encode()
        case b"loops":
            while True:
                pass
        case b"computes":
            end = time.process_time() + 0.1
            while time.process_time() < end:
                pass
        case b"in C":
            return str((7**9**9).bit_length()).encode()
        case b"recurses":
            return work(b"recurses")
        case b"memory":
            return bytes(8 << 30)
        case b"segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        case b"killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case b"raises":
            raise KeyError("no such thing")
    return data * 2


@pytest.fixture
def bounded() -> BoundedFunction:
    return BoundedFunction(work, cpu_s=0.2, memory_mib=200)


def test_answers_come_from_one_process(bounded: BoundedFunction) -> None:
    assert [bounded(text) for text in (b"a", b"", b"x" * 200_000)] == [b"aa", b"", b"x" * 400_000]
    assert int(bounded(b"pid")) == int(bounded(b"pid")) != os.getpid()


@pytest.mark.parametrize("call", [b"loops", b"in C", b"recurses", b"memory", b"segfault"])
def test_a_costly_call_is_told_apart_and_replaced(bounded: BoundedFunction, call: bytes) -> None:
    pid = int(bounded(b"pid"))
    with pytest.raises(TooCostly):
        bounded(call)
    assert int(bounded(b"pid")) != pid
    assert bounded(b"ab") == b"abab"


def test_a_starved_call_is_not_costly(bounded: BoundedFunction) -> None:
    processors = os.sched_getaffinity(0)
    os.sched_setaffinity(0, [min(processors)])
    spin = "import time\nend = time.process_time() + 60\nwhile time.process_time() < end: pass\n"
    burners = [subprocess.Popen([sys.executable, "-S", "-c", spin]) for _ in range(5)]
    try:
        began = time.monotonic()
        assert bounded(b"computes") == b"computes" * 2
        assert time.monotonic() - began > 0.3  # longer than its limit of processor time
    finally:
        os.sched_setaffinity(0, processors)
        for burner in burners:
            burner.kill()
            burner.wait()


def test_a_fault_of_the_function_or_the_machine_is_not_the_calls(bounded: BoundedFunction) -> None:
    with pytest.raises(RuntimeError, match="KeyError: 'no such thing'"):
        bounded(b"raises")
    with pytest.raises(RuntimeError, match="died by SIGKILL"):
        bounded(b"killed")
    assert bounded(b"ab") == b"abab"


def test_each_call_has_its_own_time(bounded: BoundedFunction) -> None:
    pid = bounded(b"pid")
    ended = time.process_time() + 0.3
    while time.process_time() < ended:
        assert bounded(b"a") == b"aa"
    assert bounded(b"pid") == pid


async def test_the_process_ends_with_its_owner(bounded: BoundedFunction) -> None:
    pid = int(BoundedFunction(work, cpu_s=1.0, memory_mib=200)(b"pid"))
    gc.collect()
    await until(lambda: not runs(pid))


def test_it_does_not_inherit_open_files() -> None:
    ours, theirs = os.pipe()
    bounded = BoundedFunction(
        lambda data: str(os.path.exists(f"/proc/self/fd/{theirs}")).encode(),
        cpu_s=1.0,
        memory_mib=200,
    )
    try:
        assert bounded(b"") == b"False"
    finally:
        os.close(ours)
        os.close(theirs)
