"""The harness's own books: the log as it was read while the run went on, and the tap, against what
the learner wrote. No learner code.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FINAL = ("trained", "filtered", "dropped", "dead")


@dataclass(frozen=True)
class Books:
    """What came out. All sets are empty where nothing was lost and nothing trained twice."""

    issued: int
    trained: int
    lost: set[int]
    trained_twice: set[int]
    wrong: list[str]


def reconcile(
    folder: Path,
    first: Mapping[int, tuple[int, str]],
    tap: Path,
    *,
    issued: int,
    steps: int,
    groups: int,
) -> Books:
    """Compare.

    Args:
        folder: of the run.
        first: by ticket, the first record of the log, as (sequence, kind).
        tap: file of ``rlearner.audit.tap``.
        issued: tickets that the broker has a sequence for.
        steps: of the run, each of ``groups`` groups unless a bound was met.
    """
    rows = [
        json.loads(row)
        for path in sorted((folder / "ledger").glob("step-*.jsonl"))
        for row in path.read_text().splitlines()
    ]
    ended = Counter(row["ticket"] for row in rows if row["state"] in FINAL)
    trained = [row for row in rows if row["state"] == "trained"]
    times = Counter(row["ticket"] for row in trained)
    seen = [json.loads(row) for row in tap.read_text().splitlines()]
    wrong = [
        f"ticket {row['ticket']} ended more than once"
        for row in rows
        if row["state"] in FINAL and ended[row["ticket"]] > 1
    ]
    for row in trained:
        seq, kind = first.get(row["ticket"], (0, ""))
        if (row["seq"], "Group") != (seq, kind):
            wrong.append(
                f"ticket {row['ticket']} was trained by record {row['seq']}, its first record is {kind} {seq}"
            )
    per_step = Counter(row["step"] for row in trained)
    wrong += [
        f"step {step} was trained on {per_step[step]} groups"
        for step in range(1, steps + 1)
        if per_step[step] != groups
    ]
    tickets = set(range(1, issued + 1))
    observed: set[int] = {
        line["ticket"]
        for line in seen
        if line["event"] in ("ticket", "sample") and line.get("kind") != "RulesChange"
    }
    lost = (tickets - ended.keys()) | (tickets - first.keys()) | (observed - ended.keys())
    return Books(
        issued,
        len(trained),
        lost,
        {number for number, count in times.items() if count > 1},
        sorted(set(wrong)),
    )


def check_lines(lines: list[dict[str, Any]], *, steps: int, max_staleness: int) -> None:
    """Every step has one line, none trained on anything too old, and at the end nothing is open."""
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    assert {
        line["step"]: line["staleness/max"]
        for line in lines
        if line["staleness/max"] > max_staleness
    } == {}
    for line in lines:
        assert line["ticket/issued"] == sum(line[f"ticket/{name}"] for name in (*FINAL, "open"))
    assert lines[-1]["ticket/open"] == 0
