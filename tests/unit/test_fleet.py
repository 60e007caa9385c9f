"""Children of `rlearner up`: real processes that are really killed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from learner.up import fleet as fleet_module
from learner.up.fleet import Fleet, cpu_seconds


def wait_until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


@pytest.fixture
def modules(tmp_path: Path) -> Path:
    (tmp_path / "sleeper.py").write_text("import time\nprint('up', flush=True)\ntime.sleep(600)\n")
    (tmp_path / "refuser.py").write_text("import sys\nprint('error: train.lr: -1 is not allowed', file=sys.stderr)\nsys.exit(2)\n")
    (tmp_path / "stubborn.py").write_text(
        "import signal, time\nsignal.signal(signal.SIGTERM, lambda *_: None)\nprint('up', flush=True)\nwhile True: time.sleep(1)\n"
    )
    return tmp_path


def make(modules: Path) -> Fleet:
    return Fleet(modules / "logs", {"PYTHONPATH": str(modules)})


def test_a_killed_child_is_started_again(modules: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "RESTART_AFTER_S", 0.05)
    fleet = make(modules)
    child = fleet.add("sleeper", "sleeper", [])
    first = child.pid
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: not child.running)
    events: list[str] = []
    wait_until(lambda: events.extend(fleet.watch()) or child.running)  # type: ignore[func-returns-value]
    assert child.pid != first
    assert "died by SIGKILL" in events[0]
    fleet.stop(patience_s=2.0)
    assert not child.running


def test_a_child_that_refuses_its_input_is_not_started_again(modules: Path) -> None:
    fleet = make(modules)
    child = fleet.add("refuser", "refuser", [])
    wait_until(lambda: not child.running)
    assert fleet.watch() == ["refuser ended with exit code 2"]
    assert fleet.watch() == []
    assert child.exit_code == 2
    assert child.last_lines() == ["error: train.lr: -1 is not allowed"]


def test_stop_insists(modules: Path) -> None:
    fleet = make(modules)
    child = fleet.add("stubborn", "stubborn", [])
    wait_until(lambda: child.last_lines() == ["up"])
    fleet.stop(patience_s=0.2)
    assert not child.running


def test_no_child_outlives_a_killed_parent(modules: Path) -> None:
    program = (
        "import sys, time\nfrom pathlib import Path\nfrom learner.up.fleet import Fleet\n"
        f"child = Fleet(Path({str(modules)!r}) / 'logs', {{'PYTHONPATH': {str(modules)!r}}}).add('sleeper', 'sleeper', [])\n"
        "print(child.pid, flush=True)\ntime.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert psutil.pid_exists(pid)
        parent.kill()
    wait_until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


def test_a_child_that_always_dies_is_given_up(modules: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "RESTART_AFTER_S", 0.0)
    monkeypatch.setattr(fleet_module, "RESTART_AT_MOST_S", 0.0)
    monkeypatch.setattr(fleet_module, "GIVE_UP_AFTER", 2)
    (modules / "broken.py").write_text("raise SystemExit(3)\n")
    fleet = make(modules)
    child = fleet.add("broken", "broken", [])
    events: list[str] = []
    wait_until(lambda: events.extend(fleet.watch()) or child.exit_code is not None)  # type: ignore[func-returns-value]
    assert child.exit_code == 3
    assert [event for event in events if "died" in event][-1].startswith("broken died 2 times in a row; giving up")


BURN = "import time\nwhile time.process_time() < {}: pass\n"


def test_processor_time_counts_a_process_its_living_children_and_those_it_waited_for() -> None:
    ended, living = BURN.format(0.3), BURN.format(0.2) + "print('up', flush=True)\ntime.sleep(600)\n"
    parent = (
        f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {ended!r}])\n"
        f"child = subprocess.Popen([sys.executable, '-c', {living!r}])\nchild.wait()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, start_new_session=True)
    gone = subprocess.Popen([sys.executable, "-c", "pass"])
    gone.wait()
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        used = cpu_seconds([process.pid, gone.pid])
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    assert list(used) == [process.pid]
    assert 0.45 < used[process.pid] < 2.0  # 0.5, and three starts of an interpreter; clocks tick in hundredths
