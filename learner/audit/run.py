"""One audit, from a run's folder to a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from broker.errors import UserError
from learner import archive, checkpoint, ledgerfile
from learner.audit import sources, tapped
from learner.audit.report import Report
from learner.audit.sources import Stored, check_metrics, check_source, stored
from learner.audit.tally import Tally
from learner.metrics import read_lines


def audit(
    folder: Path,
    config: Mapping[str, Any],
    *,
    log: tuple[int, Sequence[Stored]] | None = None,
    tap: Sequence[Mapping[str, Any]] | None = None,
) -> Report:
    """Reconcile all that a run left behind.

    Args:
        folder: of the run.
        config: its resolved configuration.
        log: the broker's samples log, if it can be reached: the first sequence kept, and what is there.
        tap: lines of an independent record of the wire.

    Raises:
        UserError: the run has no ledger file.
    """
    path = folder / ledgerfile.NAME
    if not path.exists():
        raise UserError(f"{path}: no such file; the learner has not begun to train, or is older than ledger files")
    report = Report()
    rows, checkpoints = read_lines(folder / "metrics.jsonl"), _checkpoints(folder / "checkpoints", report)
    lines, problem = ledgerfile.read(path)  # last: a learner at work writes it before the others
    if problem:
        report.fail(f"{problem}; the lines behind it were not read")
    tally = Tally(lines, report, checkpoints)
    steps = int(config["train"]["steps"])
    check_metrics(rows, tally, report)
    report.notes.append(f"checkpoints: {len(checkpoints)} compared")
    _check_archive(folder / archive.FOLDER, tally, report)
    if log is not None:
        check_source(log[1], tally, report, "the broker's log", first=log[0] if log[0] <= tally.position else None)
    if tap is not None:
        tapped.check_tap(tap, tally, report, done=tally.version >= steps)
    tally.check(steps=steps)
    return report


def _checkpoints(folder: Path, report: Report) -> dict[int, dict[str, Any]]:
    """By step, the ledger of every checkpoint kept."""
    states: dict[int, dict[str, Any]] = {}
    for path in checkpoint.found(folder):
        try:
            states[checkpoint.read(path).step] = checkpoint.read(path).ledger
        except UserError as error:
            if path.exists():  # else it was one too many just now
                report.fail(str(error))
    return states


def _check_archive(folder: Path, tally: Tally, report: Report) -> None:
    if not archive.files(folder):
        return
    found: list[sources.Stored] = []
    for frame in archive.frames(folder):
        if frame.error:
            report.fail(f"the archive: {frame.error}")
        else:
            found.append(stored(frame.record()))
    check_source(found, tally, report, "the archive")
