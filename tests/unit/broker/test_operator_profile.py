"""Traces and tables of the operators of some steps."""

from __future__ import annotations

import gzip
import json
import logging
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from broker.errors import ConfigError
from broker.settings.schema.training import ProfileSection
from broker.settings.sections import parse
from broker.telemetry import operator_profile
from broker.telemetry.operator_profile import ProfilePlan, ProfileTotals, StepProfiler


class Row(NamedTuple):
    key: str
    count: int
    self_cpu_time_total: float  # microseconds
    self_device_time_total: float


def plan(folder: Path, first: int, last: int) -> ProfilePlan:
    return ProfilePlan(folder / "profile", "learner", first, last)


def multiply() -> None:
    torch.ones(64, 64) @ torch.ones(64, 64)


def trace(path: Path) -> dict[str, Any]:
    with gzip.open(path, "rt") as lines:
        content: dict[str, Any] = json.load(lines)
    return content


def test_steps_are_recorded_and_the_table_is_printed_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    profiler = StepProfiler(plan(tmp_path, 2, 3))
    with caplog.at_level(logging.INFO):
        for step in (1, 2, 3, 4):
            for _ in range(2):
                with profiler.record(step):
                    multiply()
            profiler.end(step)
        profiler.close()
    names = sorted(path.name for path in (tmp_path / "profile").iterdir())
    assert names == ["learner-step-2.json.gz", "learner-step-3.json.gz", "learner.txt"]
    events = trace(tmp_path / "profile" / "learner-step-2.json.gz")["traceEvents"]
    # both pieces of work of step 2, nothing of the others
    assert sum(event.get("name") == "aten::mm" for event in events) == 2
    table = (tmp_path / "profile" / "learner.txt").read_text().splitlines()
    assert table[0].startswith("step 2, 3: ")
    assert any(line.startswith("aten::mm ") and line.endswith(" 4") for line in table)
    assert len(table) <= 2 + operator_profile.NUM_OPERATORS
    said = [record.getMessage() for record in caplog.records]
    assert sum("aten::mm" in line for line in said) == 1


def test_the_table_sorts_by_time_and_adds_steps_up() -> None:
    totals = ProfileTotals(steps=[7])
    totals.add([Row("add", 2, 250_000.0, 0.0), Row("mm", 1, 500_000.0, 0.0)])
    totals.add([Row("mm", 3, 250_000.0, 0.0)])
    # add 0.25 s of 1 s; mm 0.5 + 0.25 s in 1 + 3 calls
    rows = [line.split() for line in totals.table()]
    assert rows[0] == ["step", "7:", "1.000", "s", "of", "operators", "on", "the", "CPU"]
    assert rows[2:] == [["mm", "0.750", "75.0%", "4"], ["add", "0.250", "25.0%", "2"]]


def test_time_on_a_device_counts_where_there_is_one() -> None:
    totals = ProfileTotals(steps=[1])
    totals.add([Row("slow on the host", 1, 9e6, 0.0), Row("kernel", 1, 0.0, 2e6)])
    assert totals.table()[2].split() == ["kernel", "2.000", "100.0%", "1"]


def test_a_long_step_is_recorded_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator_profile, "MAX_RECORDED_S", 0.0)
    profiler = StepProfiler(plan(tmp_path, 1, 1))
    for _ in range(3):
        with profiler.record(1):
            multiply()
    profiler.end(1)
    events = trace(tmp_path / "profile" / "learner-step-1.json.gz")["traceEvents"]
    assert sum(event.get("name") == "aten::mm" for event in events) == 1


def test_a_trace_that_is_too_large_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(operator_profile, "MAX_TRACE_BYTES", 10)
    profiler = StepProfiler(plan(tmp_path, 1, 1))
    with profiler.record(1):
        multiply()
    profiler.end(1)
    assert [path.name for path in (tmp_path / "profile").iterdir()] == ["learner.txt"]
    assert "the trace of step 1 is too large" in caplog.text


def test_steps_that_an_engine_skips_end_the_record(tmp_path: Path) -> None:
    profiler = StepProfiler(plan(tmp_path, 2, 3))
    with profiler.record(2):
        multiply()
    with profiler.record(9):
        multiply()
    assert not profiler.is_active
    names = sorted(path.name for path in (tmp_path / "profile").iterdir())
    assert names == ["learner-step-2.json.gz", "learner.txt"]


@pytest.mark.parametrize("steps", ["12-10", "0", 0, "1-11", "a", "3-", "", -1, 2.5, "1-2-3"])
def test_other_steps_are_refused(steps: object) -> None:
    with pytest.raises(ConfigError) as caught:
        parse("train.profile", {"steps": steps}, ProfileSection)
    assert caught.value.key.startswith("train.profile.steps")
    assert "\n" not in str(caught.value)


def test_steps_make_a_plan(tmp_path: Path) -> None:
    section = parse("train.profile", {"steps": "10-12"}, ProfileSection)
    assert section.plan(tmp_path, "learner") == plan(tmp_path, 10, 12)
    assert section.last_step == 12
    single = parse("train.profile", {"steps": 4}, ProfileSection)
    assert single.plan(tmp_path, "learner") == plan(tmp_path, 4, 4)
    assert ProfileSection().plan(tmp_path, "learner") is None


def test_a_folder_that_cannot_be_written_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "profile").write_text("in the way")
    profiler = StepProfiler(plan(tmp_path, 1, 1))
    with profiler.record(1):
        multiply()
    profiler.end(1)
    assert "learner-step-1.json.gz is not written: " in caplog.text
    assert "learner.txt is not written: " in caplog.text
