"""``rlearner audit``: reads the run's folder, the samples log and the tap; prints the report."""

from __future__ import annotations

import argparse
import asyncio
import json
from contextlib import aclosing
from pathlib import Path
from typing import Final

from broker.contract.streams import SAMPLES
from broker.errors import LostState
from broker.jetstream.bus import Bus
from broker.system.visible_text import visible
from learner.run_folder import connect_run, find_run
from rlearner.audit import tap_records
from rlearner.audit.report import AuditReport
from rlearner.audit.run import read_run_records, reconcile_run
from rlearner.audit.sources import AuditedRecord, audited_record

# A running learner trims the log now and then, hardly ever twice during one read.
TRIES: Final = 3
# Reading stops after this silence: the newest records of the log may have been deleted.
SILENCE_S: Final = 5.0


async def audit_run(options: argparse.Namespace) -> int:
    """Audit the run and return the exit code."""
    place = find_run(options.run_name, options.dir)
    async with connect_run(options, place.name, place.folder) as (bus, problem):
        # The learner's files come first: the log has all that the learner consumed.
        run_records = read_run_records(place.folder)
        log = await read_log(bus) if bus else None
    tap = tap_records.read_tap(Path(options.tap)) if options.tap else None
    report = reconcile_run(run_records, log=log, tap=tap)
    if not bus:
        report.notes.append(f"the broker's log was not compared: {problem}")
    _print_report(report, place.name, as_json=options.json)
    return 0 if report.ok else 1


async def read_log(bus: Bus) -> tuple[int, list[AuditedRecord]]:
    """Return the first sequence that the samples log keeps, and its records.

    Raises:
        LostState: if the broker has lost its store.
    """
    for _ in range(TRIES - 1):
        try:
            return await _read_log(bus)
        except LostState:  # a running learner has trimmed the log
            continue
    return await _read_log(bus)


async def _read_log(bus: Bus) -> tuple[int, list[AuditedRecord]]:
    first = await bus.first_seq(SAMPLES)
    last = await bus.last_seq(SAMPLES)
    audited: list[AuditedRecord] = []
    if first > last:
        return first, audited
    # Without the parts of large groups, which may be deleted before their record.
    async with aclosing(bus.read_log(SAMPLES, first, wanted=lambda _: False)) as records:
        while not audited or audited[-1].seq < last:
            try:
                async with asyncio.timeout(SILENCE_S):
                    audited.append(audited_record(await anext(records)))
            except TimeoutError:
                break
    return first, audited


def _print_report(report: AuditReport, run: str, *, as_json: bool) -> None:
    figures = report.to_json()
    if as_json:
        print(json.dumps(figures))
        return
    print(f"run {run}")
    for name in (
        "tickets",
        "trained",
        "filtered",
        "dropped",
        "dead",
        "open",
        "lost",
        "trained_twice",
        "not_archived",
    ):
        print(f"  {name:14}{figures[name]}")
    for note in report.notes:
        print(visible(f"  {note}"))
    for problem in report.problems:
        print(visible(f"PROBLEM: {problem}"))
    if report.ok:
        print("ok")
    else:
        print(f"NOT OK: {len(report.problems)} problems")
