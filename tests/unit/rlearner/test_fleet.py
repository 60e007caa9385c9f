"""Children of `rlearner up`: real processes that are really killed."""

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from rlearner.up import fleet as fleet_module
from rlearner.up.fleet import ProcessFleet
from rlearner.up.run import stop_patience_s
from rlearner.up.shutdown_display import ShutdownDisplay, waiting_line


def wait_until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


@pytest.fixture
def modules(tmp_path: Path) -> Path:
    (tmp_path / "sleeper.py").write_text("import time\nprint('up', flush=True)\ntime.sleep(600)\n")
    (tmp_path / "refuser.py").write_text(
        "import sys\nprint('error: train.lr: -1 is not allowed', file=sys.stderr)\nsys.exit(2)\n"
    )
    (tmp_path / "stubborn.py").write_text(
        "import signal, time\nsignal.signal(signal.SIGTERM, lambda *_: None)\nprint('up', flush=True)\nwhile True: "
        "time.sleep(1)\n"
    )
    return tmp_path


def make(modules: Path) -> ProcessFleet:
    return ProcessFleet(modules / "logs", {"PYTHONPATH": str(modules)})


NICENESS = """import os, subprocess, sys, time
from broker.system.children import spawn
from pathlib import Path
group = Path("/proc/self/autogroup")
print(os.getpriority(os.PRIO_PROCESS, 0), group.read_text().split()[-1] if group.exists() else "-", flush=True)
if sys.argv[1:]:
    spawn([sys.executable, __file__], sys.stdout.buffer).wait()
"""


def test_a_nice_child_and_its_children_give_way(modules: Path) -> None:
    (modules / "niceness.py").write_text(NICENESS)
    fleet, own = make(modules), os.getpriority(os.PRIO_PROCESS, 0)
    children = [fleet.add(f"nice-{nice}", "niceness", ["again"], nice=nice) for nice in (0, 7)]
    for child, nice in zip(children, (0, 7), strict=True):
        wait_until(lambda child=child: not child.running)  # type: ignore[misc]
        lines = [line.split() for line in child.log.read_text().splitlines()]
        expected = own + nice
        assert [int(line[0]) for line in lines] == [expected, expected]
        grouped = [int(line[1]) for line in lines if line[1] != "-"]
        # Not to wait for the one right of all users, a child that inherits its niceness may go
        # without its group's.
        assert grouped[:1] in ([], [expected])
        assert set(grouped[1:]) <= {0, expected}


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
    (event,) = fleet.watch()
    assert (event, event.kind, event.process) == (
        "refuser ended with exit code 2",
        "stop",
        "refuser",
    )
    assert fleet.watch() == []
    assert child.exit_code == 2
    assert child.last_lines() == ["error: train.lr: -1 is not allowed"]


def test_a_child_that_was_asked_to_stop_is_not_started_again_and_has_not_failed(
    modules: Path,
) -> None:
    (modules / "asked.py").write_text("raise SystemExit(130)\n")
    fleet = make(modules)
    child = fleet.add("asked", "asked", [])
    wait_until(lambda: not child.running)
    assert fleet.watch() == ["asked ended with exit code 130"]
    assert (fleet.watch(), child.exit_code) == ([], 130)
    fleet.raise_for_failures()


def test_stop_insists(modules: Path) -> None:
    fleet = make(modules)
    child = fleet.add("stubborn", "stubborn", [])
    wait_until(lambda: child.last_lines() == ["up"])
    fleet.stop(patience_s=0.2)
    assert not child.running


def test_learner_has_time_for_its_checkpoint_when_another_child_fails(modules: Path) -> None:
    fleet = make(modules)
    learner = fleet.add("learner", "sleeper", [])
    hub = fleet.add("envhub", "sleeper", [])
    assert stop_patience_s(fleet.children, has_request=False) == 30.0
    os.kill(learner.pid, signal.SIGKILL)
    wait_until(lambda: not learner.running)
    assert hub.running
    assert stop_patience_s(fleet.children, has_request=False) == 10.0
    assert stop_patience_s(fleet.children, has_request=True) == 30.0
    fleet.kill()


def test_no_child_outlives_a_killed_parent(modules: Path) -> None:
    program = (
        "import sys, time\nfrom pathlib import Path\nfrom rlearner.up.fleet import ProcessFleet\n"
        f"child = ProcessFleet(Path({str(modules)!r}) / 'logs', {{'PYTHONPATH': {str(modules)!r}}}).add('sleeper', "
        f"'sleeper', [])\n"
        "print(child.pid, flush=True)\ntime.sleep(600)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert psutil.pid_exists(pid)
        parent.kill()
    wait_until(
        lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    )


def test_a_child_that_always_dies_is_given_up(
    modules: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_module, "RESTART_AFTER_S", 0.0)
    monkeypatch.setattr(fleet_module, "RESTART_AT_MOST_S", 0.0)
    monkeypatch.setattr(fleet_module, "GIVE_UP_AFTER", 2)
    (modules / "broken.py").write_text(
        "import sys\nprint('ValueError: a number is missing')\nsys.exit(3)\n"
    )
    fleet = make(modules)
    child = fleet.add("broken", "broken", [])
    events: list[str] = []
    wait_until(lambda: events.extend(fleet.watch()) or child.exit_code is not None)  # type: ignore[func-returns-value]
    assert child.exit_code == 3
    deaths = [event for event in events if "died" in event]
    assert (
        ") died with exit code 3: ValueError: a number is missing; starting it again in 0 s"
        in deaths[0]
    )
    assert deaths[-1].startswith("broken died 2 times in a row; giving up")


def test_who_is_waited_for_and_for_how_long() -> None:
    assert (
        waiting_line(["learner"], 27.4) == "waiting for learner (writing the last checkpoint): 27 s"
    )
    assert (
        waiting_line(["envhub", "rollout-random"], 0.0)
        == "waiting for envhub (ending its episodes), rollout-random: 0 s, stopping them now"
    )


def test_stopping_tells_who_has_not_ended_and_counts_down(modules: Path) -> None:
    fleet = make(modules)
    stubborn, sleeper = fleet.add("learner", "stubborn", []), fleet.add("envhub", "sleeper", [])
    wait_until(lambda: bool(stubborn.last_lines() and sleeper.last_lines()))
    shown: list[tuple[list[str], float]] = []
    fleet.stop(
        ("learner",),
        patience_s=0.5,
        show=lambda waiting, left_s: shown.append((list(waiting), left_s)),
    )
    assert not any(child.running for child in fleet.children)
    leading = [left_s for waiting, left_s in shown if waiting == ["learner"]]
    assert leading == sorted(leading, reverse=True)
    assert leading[0] > 0.2
    assert leading[-1] == 0.0  # told to end at once


class Terminal(io.StringIO):
    """A file that says it is one."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_one_line_and_a_file_a_line_at_growing_intervals(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr("rlearner.up.shutdown_display.time.monotonic", lambda: now[0])
    for out, expected in ((Terminal(), 8), (io.StringIO(), 2)):
        now[0] = 0.0
        farewell = ShutdownDisplay(out)
        for second in range(9):
            now[0] = float(second)
            farewell(["learner"], 30.0 - second)
        farewell.close()
        assert (
            out.getvalue().count("waiting for learner (writing the last checkpoint): ") == expected
        )
        assert (out.getvalue().count("\n"), out.getvalue().endswith("\r\x1b[K")) == (
            (0, True) if out.isatty() else (2, False)
        )


def test_a_second_signal_ends_the_whole_fleet_at_once(modules: Path) -> None:
    script = modules / "above.py"
    script.write_text(
        "import asyncio, sys\nfrom pathlib import Path\nfrom broker.runtime.process import Stop, main\n"
        "from rlearner.up.shutdown_display import ShutdownDisplay\n"
        "from rlearner.up.fleet import ProcessFleet\n\n\nasync def body(stop):\n"
        f"    fleet = ProcessFleet(Path({str(modules / 'logs')!r}), {{'PYTHONPATH': {str(modules)!r}}})\n"
        "    stop.at_once.append(fleet.kill)\n    child = fleet.add('learner', 'stubborn', [])\n"
        "    while not child.last_lines():\n        await asyncio.sleep(0.02)\n"
        "    print(child.pid, flush=True)\n    await stop.asked.wait()\n"
        "    await asyncio.to_thread(fleet.stop, patience_s=600.0, show=ShutdownDisplay())\n\n\nsys.exit(main('up', "
        "body))\n"
    )
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as above:
        assert above.stdout is not None
        assert above.stderr is not None
        pid = int(above.stdout.readline())
        above.send_signal(signal.SIGINT)
        while not (said := above.stderr.readline()).startswith(
            "waiting for learner (writing the last checkpoint): 59"
        ):
            assert said, "it ended before it waited"
        above.send_signal(signal.SIGINT)
        assert above.wait(60) == 130
    wait_until(lambda: not psutil.pid_exists(pid))
