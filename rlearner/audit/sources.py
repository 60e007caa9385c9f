"""Compares the ledger file with metrics.jsonl, the broker's log, and the archive of records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Final

from broker.contract import wire
from broker.jetstream.bus import LogRecord
from learner.credit.ledger_file import FINAL, LedgerLine, digest_record
from learner.credit.record_intake import version_bounds
from rlearner.audit.ledger_audit import LedgerAudit, check_staleness
from rlearner.audit.report import AuditReport, format_ranges

TICKET_STATES: Final = ("issued", *FINAL, "open")


@dataclass(frozen=True)
class AuditedRecord:
    """The audited part of a record in the broker or the archive."""

    seq: int
    ticket: int  # from the message, else from its header
    digest: str  # empty: unknown, for a group in parts that were not fetched
    is_group: bool
    oldest: int = -1
    newest: int = -1


@dataclass(frozen=True)
class SourceCoverage:
    """Sequences of consumed records that a source holds, lacks, and need not hold."""

    seqs: Set[int]
    missing: Set[int]
    left_out: Set[int]


def audited_record(record: LogRecord) -> AuditedRecord:
    """Return a record without its data."""
    message = record.message
    if isinstance(message, wire.Parted):
        return AuditedRecord(record.seq, message.ticket, "", is_group=True)
    ticket = message.ticket if isinstance(message, wire.Group | wire.Closed) else record.ticket
    audited = AuditedRecord(record.seq, ticket, digest_record(record.data), is_group=False)
    if not isinstance(message, wire.Group):
        return audited
    oldest, newest = version_bounds([message]) or (-1, -1)
    return replace(audited, is_group=True, oldest=oldest, newest=newest)


def check_metrics(
    rows: Sequence[Mapping[str, Any]], tally: LedgerAudit, report: AuditReport
) -> None:
    """Compare each step's line in metrics.jsonl with the ledger file."""
    steps = [int(row["step"]) for row in rows]
    twice = {step for step, count in Counter(steps).items() if count > 1}
    report.fail_all("metrics.jsonl has more than one line for steps {}", twice)
    first = min(tally.boundaries, default=0)
    version = tally.version
    required_steps = {step for step in tally.boundaries if first < step < version}
    report.fail_all("metrics.jsonl has no line for steps {}", required_steps - set(steps))
    unknown = set(steps) - tally.boundaries.keys()
    report.fail_all(
        "metrics.jsonl has lines for steps {} that the ledger file does not have", unknown
    )
    trained: dict[int, list[LedgerLine]] = {}
    for line in chain.from_iterable(tally.ended.values()):
        if line.step:
            trained.setdefault(line.step, []).append(line)
    for row in rows:
        step = int(row["step"])
        if step not in tally.boundaries:
            continue
        metric_counts = {
            name: int(row[f"ticket/{name}"]) for name in TICKET_STATES if f"ticket/{name}" in row
        }
        wrong = [
            [name for name, count in metric_counts.items() if count != counts.get(name)]
            for counts in tally.counts[step]
        ]
        if all(wrong):
            report.fail(
                f"step {step}: metrics.jsonl and the ledger file disagree on {', '.join(wrong[-1])}"
            )
        lag = max(
            (step - 1 - line.oldest for line in trained.get(step, []) if line.oldest >= 0),
            default=0,
        )
        # The metric is smaller where the oldest tokens were not trained on.
        if (most := row.get("staleness/max", 0.0)) > lag:
            report.fail(
                f"step {step}: staleness/max is {most:g} in metrics.jsonl, {lag} by the ledger file"
            )
    report.notes.append(f"metrics.jsonl: {len(rows)} steps compared")


def check_source(
    records: Iterable[AuditedRecord],
    tally: LedgerAudit,
    report: AuditReport,
    name: str,
    *,
    first: int | None = None,
    left_out: Iterable[tuple[int, int]] = (),
) -> SourceCoverage:
    """Compare the records of the log, or of its archive, with the ledger file.

    Args:
        name: name of the source in messages.
        first: sequence that it should begin with, None: any.
        left_out: (first, last) sequences of ranges that it need not hold.
    """
    records_by_seq: dict[int, AuditedRecord] = {}
    beyond = 0
    for record in records:
        # The learner has not consumed these yet.
        if record.seq > tally.position:
            beyond += 1
        elif record.seq in records_by_seq:
            report.fail(f"{name}: record {record.seq} (ticket {record.ticket}) is there twice")
        else:
            records_by_seq[record.seq] = record
            _compare_record(record, tally, report, name)
    begin = min(records_by_seq, default=tally.position + 1) if first is None else first
    missing = set(range(begin, tally.position + 1)) - records_by_seq.keys()
    excused = {seq for seq in missing if any(low <= seq <= high for low, high in left_out)}
    missing -= excused
    report.fail_all(f"{name}: records {{}} are missing", missing)
    compared = f"{len(records_by_seq)} records compared ({format_ranges(records_by_seq) or 'none'})"
    note = f"{compared}, {beyond} not consumed yet"
    if first is None and begin > tally.position >= 1 and not beyond:
        note = f"holds none of the {tally.position} records that were consumed"
    report.notes.append(f"{name}: {note}")
    return SourceCoverage(records_by_seq.keys(), missing, excused)


def check_lost(sources: Sequence[SourceCoverage], tally: LedgerAudit, report: AuditReport) -> None:
    """Count the missing records of unknown tickets, and open tickets without their record."""
    available = {seq for source in sources for seq in source.seqs}
    for seq in {seq for source in sources for seq in source.missing} - available:
        if seq in tally.records:
            report.lost.update(
                line.ticket for line in tally.records[seq] if line.ticket in tally.open
            )
        else:
            report.lost_records += 1


def _compare_record(
    record: AuditedRecord, tally: LedgerAudit, report: AuditReport, name: str
) -> None:
    subject = f"{name}: record {record.seq} of ticket {record.ticket}"
    lines = tally.records.get(record.seq)
    if not lines:
        report.fail(f"{subject} is not in the ledger file")
        if record.ticket not in tally.ended:
            report.lost.add(record.ticket)
        return
    line = lines[0]
    if (line.ticket, line.digest) != (record.ticket, record.digest or line.digest):
        report.fail(
            f"{name}: record {record.seq} is of ticket {record.ticket} ({record.digest}), "
            f"the ledger file read ticket {line.ticket} ({line.digest}) there"
        )
        return
    for end in tally.ended.get(record.ticket, []):
        if end.state != "trained" or end.seq != record.seq:
            continue
        if not record.is_group:
            report.fail(f"{subject} is not a group, but was trained in step {end.step}")
        check_staleness(
            report,
            end,
            record.oldest,
            newest=record.newest,
            bound=tally.max_staleness(end.step),
            source=name,
        )
