"""Compares the ledger file with a tap: an independent record of messages, see ``tap.py``.

A tap sees every attempt to publish, including those that the broker drops as duplicates, and it has
no sequences. So what was consumed must have been seen at least as often, and what was seen must
have a final state.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from broker.errors import DataError, UserError
from rlearner.audit.ledger_audit import LedgerAudit, check_staleness
from rlearner.audit.report import AuditReport


def read_tap(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a tap, without an incomplete last one.

    Raises:
        UserError: if the file cannot be read, or a line is not a tap's.
    """
    try:
        # The part after the last newline is a line that is still being written.
        rows = path.read_text(encoding="utf-8").split("\n")[:-1]
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    lines: list[dict[str, Any]] = []
    for number, row in enumerate(rows, start=1):
        try:
            line = json.loads(row)
        except json.JSONDecodeError as error:
            raise DataError(str(path), number, str(error)) from None
        if (
            not isinstance(line, dict)
            or not isinstance(line.get("n"), int)
            or not isinstance(line.get("event"), str)
        ):
            raise DataError(str(path), number, "expected a tap's line, with `n` and `event`")
        lines.append(line)
    return lines


def check_tap(
    lines: Sequence[Mapping[str, Any]], tally: LedgerAudit, report: AuditReport, *, is_done: bool
) -> None:
    """Compare a tap with the ledger file.

    If the run is done, every ticket in the tap must have a final state.
    """
    numbers = Counter(int(line["n"]) for line in lines)
    newest = max(numbers, default=0)
    report.fail_all("tap: its own lines {} are missing", set(range(1, newest + 1)) - numbers.keys())
    report.fail_all(
        "tap: its own lines {} appear twice",
        {number for number, times in numbers.items() if times > 1},
    )
    interruptions = sorted(
        {
            str(line["event"])
            for line in lines
            if line["event"] not in ("open", "ticket", "sample", "close")
        }
    )
    tickets = [line for line in lines if line["event"] == "ticket"]
    samples = [line for line in lines if line["event"] == "sample"]
    is_whole = not interruptions and any(line["event"] == "open" for line in lines)
    _check_tickets(tickets, tally, report, is_done=is_done, is_whole=is_whole)
    _check_samples(samples, tally, report, is_done=is_done, is_whole=is_whole)
    gaps = ""
    if interruptions:
        causes = ", ".join(interruptions)
        gaps = f"; it was interrupted ({causes}), so missing messages prove nothing"
    count = len({line["ticket"] for line in tickets})
    report.notes.append(f"tap: {count} tickets and {len(samples)} records seen{gaps}")


def _check_tickets(
    lines: Sequence[Mapping[str, Any]],
    tally: LedgerAudit,
    report: AuditReport,
    *,
    is_done: bool,
    is_whole: bool,
) -> None:
    contents: dict[int, Mapping[str, Any]] = {}
    for line in lines:
        number = int(line["ticket"])
        first = contents.setdefault(number, line)
        if first["digest"] != line["digest"]:
            report.fail(f"tap: ticket {number} went out with two different contents")
    strangers = contents.keys() - tally.issued.keys()
    newest = max(tally.issued, default=0)
    # The ledger file may be read before the newest tickets of a live run are written to it.
    missing = strangers if is_done else {number for number in strangers if number <= newest}
    report.lost |= missing
    report.fail_all("tap: tickets {} went out, but the ledger file has not issued them", missing)
    skipped = {number for number, line in tally.issued.items() if not line.domain}  # by a rebase
    if is_whole:
        # Newer tickets may not have been published yet when the learner was killed.
        last = max(contents, default=0)
        unseen = tally.issued.keys() - contents.keys() - skipped
        unseen = {number for number in unseen if number in tally.ended or number < last}
        report.fail_all("tap: tickets {} never went out", unseen)
    for number, line in sorted(contents.items()):
        issued = tally.issued.get(number)
        if issued is None or number in skipped:
            continue
        if any(
            line.get(name) != getattr(issued, name)
            for name in ("domain", "task_index", "min_version")
        ):
            report.fail(
                f"tap: ticket {number} went out with contents that differ from the ledger file"
            )


def _check_samples(
    samples: Sequence[Mapping[str, Any]],
    tally: LedgerAudit,
    report: AuditReport,
    *,
    is_done: bool,
    is_whole: bool,
) -> None:
    tap_counts = Counter((int(line["ticket"]), str(line["digest"])) for line in samples)
    consumed_counts = Counter(
        (line.ticket, line.digest) for lines in tally.records.values() for line in lines
    )
    if is_whole:
        for (number, digest), count in sorted(consumed_counts.items()):
            tap_count = tap_counts[number, digest]
            if tap_count < count:
                record = f"tap: record {digest} of ticket {number}"
                report.fail(f"{record} was consumed {count} times, seen {tap_count} times")
    if is_done:
        unfinished = {
            number
            for number, _ in tap_counts
            if number in tally.issued and number not in tally.ended
        }
        report.lost |= unfinished
        report.fail_all(
            "tap: records of tickets {} were seen, but they have no final state", unfinished
        )
    by_digest = {(int(line["ticket"]), str(line["digest"])): line for line in samples}
    for number, end in sorted(tally.trained.items()):
        line = by_digest.get((number, end.digest))
        if line is None:
            continue  # counted above
        if line.get("kind") != "Group":
            report.fail(f"tap: what trained ticket {number} was a {line.get('kind')}")
        oldest = int(line.get("oldest", -1))
        newest = int(line.get("newest", -1))
        check_staleness(
            report,
            end,
            oldest,
            newest=newest,
            bound=tally.max_staleness(end.step),
            source="the tap",
        )
