"""A run that keeps its newest groups only, killed once: what is missing is said, not counted."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from bench import resume
from learner.credit.archive import read_frames
from learner.credit.archive_trim import max_groups, read_trim
from rlearner.cli import main

STEPS = 7
KEEP = 8


def test_commands_name_the_setting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert asyncio.run(resume.disturbed(tmp_path, STEPS, 1, seed=3, keep=KEEP)) == 1
    run = tmp_path / "runs" / resume.RUN

    def call(command: str, *arguments: str) -> tuple[int, str, str]:
        code = main([command, run.name, *arguments, "--dir", str(run.parent)])
        out, err = capsys.readouterr()
        return code, out, err

    tickets = {frame.ticket for frame in read_frames(run / "samples")} - {0}
    assert KEEP <= len(tickets) <= max_groups(KEEP)
    figures = sorted(int(path.stem) for path in (run / "samples" / "tokens").iterdir())
    assert figures == [4, 5, 6, 7]
    kept = f"the archive keeps the newest {KEEP} groups (samples.keep)"

    code, out, err = call("audit", "--json")
    report = json.loads(out)
    assert (code, report["problems"], report["lost"], report["not_archived"]) == (0, [], 0, 0), err
    before = read_trim(run / "samples").before
    assert f"records before {before} are no longer there: {kept}" in report["notes"]

    code, _, err = call("show", "1")
    assert (code, err.count("\n")) == (2, 1)
    assert f"of ticket 1 is no longer there: {kept}; nor is it in the broker's log" in err
    code, out, _ = call("trace", "1")
    assert (code, f"no longer there: {kept}" in out) == (0, True)
    assert call("show", str(max(tickets)))[0] == 0

    code, out, err = call("replay", "--from", "0", "--to", str(STEPS))
    assert (code, out) == (2, "")
    assert err.endswith(f"record 1, which sets the run's rules, is no longer there: {kept}\n")
    code, out, _ = call("replay", "--from", "6", "--to", "7")
    assert code == 0
    assert out.splitlines()[-1] == "identical: 1 steps, and all tensors of checkpoint 7"
