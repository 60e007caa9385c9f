"""Processor time of a process counts its descendants, also those seen late."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from rlearner.up import processor_times
from rlearner.up.processor_times import ProcessorTimes

BURN = "import time\nwhile time.process_time() < {}: pass\n"


@pytest.mark.parametrize("list_every_s", [0.0, 600.0])
def test_processor_time_counts_a_process_its_living_children_and_those_it_waited_for(
    monkeypatch: pytest.MonkeyPatch, list_every_s: float
) -> None:
    """A second reading sees a child that the first did not, once processes are listed again."""
    monkeypatch.setattr(processor_times, "LIST_EVERY_S", list_every_s)
    ended = BURN.format(0.3)
    living = BURN.format(0.2) + "print('up', flush=True)\ntime.sleep(600)\n"
    parent = (
        f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {ended!r}])\n"
        "print('waited', flush=True)\nsys.stdin.readline()\n"
        f"child = subprocess.Popen([sys.executable, '-c', {living!r}])\nchild.wait()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", parent],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    gone = subprocess.Popen([sys.executable, "-c", "pass"])
    gone.wait()
    times = ProcessorTimes()
    pids = [process.pid, gone.pid]
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"waited\n"
        alone = times.read(pids)
        process.stdin.write(b"go on\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"up\n"
        together = times.read(pids)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    assert list(alone) == list(together) == [process.pid]
    # Starts of an interpreter take time as well; clocks tick in hundredths.
    assert 0.25 < alone[process.pid] < 2.0
    has_child = together[process.pid] - alone[process.pid] > 0.15
    assert has_child == (list_every_s == 0.0)
