"""The share of a host's processors in use: of all its cores, and within a container's limits."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from broker.system import processor_use
from broker.system.processor_use import ProcessorUse


class Times(tuple[float, ...]):
    """What psutil returns for one core: user, idle, iowait, and guest, which is part of user."""

    user = property(lambda times: times[0])
    idle = property(lambda times: times[1])
    iowait = property(lambda times: times[2])
    guest = property(lambda times: times[3])


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Two cores whose times a test sets, and the time."""
    state = SimpleNamespace(at=0.0, cores=[Times((0, 0, 0, 0)), Times((0, 0, 0, 0))])
    monkeypatch.setattr(processor_use.psutil, "cpu_times", lambda percpu: state.cores)
    monkeypatch.setattr(processor_use.psutil, "cpu_count", lambda: 2)
    monkeypatch.setattr(processor_use.time, "monotonic", lambda: state.at)
    return state


def test_busy_cores_count_and_waiting_for_a_disk_does_not(clock: Any, tmp_path: Path) -> None:
    use = ProcessorUse(tmp_path)
    clock.cores = [Times((9, 0, 1, 4)), Times((7, 3, 0, 0))]
    assert use.figures() == {"host/cores": 2.0, "host/cpu_busy": pytest.approx(0.8)}
    assert use.figures() == {}  # no time has passed
    clock.cores = [Times((19, 0, 1, 4)), Times((17, 3, 0, 0))]
    assert use.figures()["host/cpu_busy"] == pytest.approx(1.0)


def test_a_container_counts_its_own_cores(clock: Any, tmp_path: Path) -> None:
    (tmp_path / "cpuset.cpus.effective").write_text("1\n")
    use = ProcessorUse(tmp_path)
    clock.cores = [Times((0, 10, 0, 0)), Times((9, 1, 0, 0))]
    assert use.figures() == {"host/cores": 1.0, "host/cpu_busy": pytest.approx(0.9)}


def test_a_container_is_full_at_its_quota(clock: Any, tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    (tmp_path / "cpu.stat").write_text("usage_usec 1000000\nuser_usec 1\n")
    use = ProcessorUse(tmp_path)
    clock.at = 10.0
    clock.cores = [Times((3, 7, 0, 0)), Times((3, 7, 0, 0))]
    (tmp_path / "cpu.stat").write_text("usage_usec 5900000\nuser_usec 1\n")
    assert use.figures() == {"host/cores": 0.5, "host/cpu_busy": pytest.approx(0.98)}


def test_no_limit_and_unreadable_files_mean_all_cores(clock: Any, tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "cpuset.cpus.effective").write_text("\n")
    use = ProcessorUse(tmp_path)
    clock.cores = [Times((5, 5, 0, 0)), Times((5, 5, 0, 0))]
    assert use.figures() == {"host/cores": 2.0, "host/cpu_busy": pytest.approx(0.5)}


def test_this_host_is_read() -> None:
    use = ProcessorUse()
    figures: dict[str, float] = {}
    while not figures:  # the kernel counts in ticks
        figures = use.figures()
    assert figures["host/cores"] > 0
    assert 0 <= figures["host/cpu_busy"] <= 1
