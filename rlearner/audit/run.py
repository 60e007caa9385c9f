"""Runs an audit, from a run's folder to a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from broker.errors import UserError
from learner.checkpoints import checkpoint
from learner.credit import archive, ledger_file, ledger_segments
from learner.credit.archive_trim import read_trim
from learner.reporting.metrics import damaged_line, read_lines
from rlearner.audit import sources, tap_records
from rlearner.audit.ledger_audit import LedgerAudit
from rlearner.audit.report import AuditReport, format_ranges
from rlearner.audit.sources import (
    AuditedRecord,
    SourceCoverage,
    audited_record,
    check_lost,
    check_metrics,
    check_source,
)


@dataclass(frozen=True)
class RunRecords:
    """The learner's own files, read in an order in which a running learner shows no contradiction.

    Attributes:
        rows: metrics.jsonl, read before the ledger file, which is written first.
        checkpoints: the ledger of each checkpoint by step, also read before the ledger file.
        lines: the ledger file.
        problems: what could not be read.
    """

    folder: Path
    rows: list[dict[str, Any]]
    checkpoints: dict[int, dict[str, Any]]
    lines: list[ledger_file.LedgerLine]
    problems: list[str]


def read_run_records(folder: Path) -> RunRecords:
    """Read the learner's files, before the other sources, which hold all that it consumed.

    Raises:
        UserError: if the run has no ledger file, or one of an earlier version.
    """
    path = folder / ledger_segments.FOLDER
    if not ledger_segments.segment_files(path):
        raise UserError(f"{path}: no ledger files; the learner has not begun to train")
    problems: list[str] = []
    metrics = folder / "metrics.jsonl"
    # Before the ledger file, which the learner writes first: so no line of it is missing there.
    rows = read_lines(metrics)
    checkpoints = _checkpoint_ledgers(folder / "checkpoints", problems)
    if number := damaged_line(metrics):
        problems.append(
            f"{metrics}: line {number} does not hold the metrics of a step; "
            "later lines were not read"
        )
    segments = ledger_segments.LedgerLines(path)
    lines = list(segments)
    if segments.problem:
        problems.append(f"{segments.problem}; later lines were not read")
    return RunRecords(folder, rows, checkpoints, lines, problems)


def reconcile_run(
    run_records: RunRecords,
    *,
    log: tuple[int, Sequence[AuditedRecord]] | None = None,
    tap: Sequence[Mapping[str, Any]] | None = None,
) -> AuditReport:
    """Compare everything that a run has left.

    Args:
        log: the broker's samples log, if it can be reached: the first sequence kept, and the
            records.
        tap: lines of an independent recording of the messages.
    """
    report = AuditReport(problems=list(run_records.problems))
    tally = LedgerAudit(run_records.lines, report, run_records.checkpoints)
    check_metrics(_metric_rows(run_records, tally.version), tally, report)
    report.notes.append(f"checkpoints: {len(run_records.checkpoints)} compared")
    coverages = _check_archive(run_records.folder / archive.FOLDER, tally, report)
    if log is not None:
        begin = log[0] if log[0] <= tally.position else None
        coverages.append(check_source(log[1], tally, report, "the broker's log", first=begin))
    check_lost(coverages, tally, report)
    if tap is not None:
        tap_records.check_tap(tap, tally, report, is_done=tally.is_done)
    tally.check()
    return report


def _metric_rows(run_records: RunRecords, version: int) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl, with newer ones of steps that the ledger file has."""
    known_steps = {row["step"] for row in run_records.rows}
    rows = read_lines(run_records.folder / "metrics.jsonl")
    return run_records.rows + [
        row for row in rows if row["step"] <= version and row["step"] not in known_steps
    ]


def _checkpoint_ledgers(folder: Path, problems: list[str]) -> dict[int, dict[str, Any]]:
    """Return the ledger of every kept checkpoint by step."""
    states: dict[int, dict[str, Any]] = {}
    for path in checkpoint.list_checkpoints(folder):
        try:
            kept = checkpoint.read_checkpoint(path)
            states[kept.step] = kept.ledger
        except UserError as error:
            if path.exists():  # else the learner has just deleted it
                problems.append(str(error))
    return states


def _check_archive(folder: Path, tally: LedgerAudit, report: AuditReport) -> list[SourceCoverage]:
    if not archive.archive_files(folder):
        return []
    archived: list[sources.AuditedRecord] = []
    for frame in archive.read_frames(folder):
        if frame.error:
            report.fail(f"the archive: {frame.error}")
        else:
            archived.append(audited_record(frame.record()))
    # Read after the records: a running learner removes more of them.
    trim = read_trim(folder)
    left_out = [*archive.paused_ranges(folder), (1, trim.before - 1)]
    coverage = check_source(archived, tally, report, "the archive", left_out=left_out)
    if trim.before:
        report.notes.append(f"records before {trim.before} are no longer there: {trim}")
    if paused := {seq for seq in coverage.left_out if seq >= trim.before}:
        report.not_archived = len(paused)
        report.notes.append(
            f"not archived: {len(paused)} records ({format_ranges(paused)}), "
            "consumed while samples.keep was off"
        )
    return [coverage]
