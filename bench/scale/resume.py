"""Measure a learner's start after many groups, in which it reads only the recent part of its files.

The groups are written through the learner's own classes, without payloads; each start runs in a
separate process.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from broker.jetstream.bus import LogRecord
from broker.runtime.process import Stop
from learner.checkpoints import checkpoint
from learner.config import SamplesSection
from learner.credit.ledger import Action, GroupArrival, IssueTicket, Ledger, TicketEnd
from learner.credit.record_intake import RecordIntake
from learner.credit.records import LedgerRecorder
from learner.credit.recovery import known_progress
from learner.credit.ticket_rules import DomainRule, TicketRules
from learner.reporting.metrics import MetricsFile, count_tickets

GROUPS: Final = 1_000_000
FEW: Final = 1_000
PART: Final = "part-00001-of-00001.safetensors"  # empty: a start reads the weights elsewhere
RULES: Final = TicketRules(
    steps=1 << 30,
    groups_per_step=100,
    max_staleness=1,
    on_late="drop",
    seed=0,
    domains=(DomainRule("lake", 1.0, 8, 8, 600.0), DomainRule("math", 3.0, 8, 8, 600.0)),
)
CHECKPOINT_EVERY: Final = 5  # steps; the start cuts what was written behind the newest one
PAYLOAD: Final = bytes(200)
SAMPLES: Final = SamplesSection(keep=True)
# a real line holds about as many
FIGURES: Final = {f"made_up/{number:02d}": 1 / 3 + number for number in range(60)}


async def write(folder: Path, groups: int) -> None:
    """Leave the folder of a run that was killed when ``groups`` were trained, three steps behind
    its checkpoint.
    """
    ledger = Ledger(RULES)
    records = LedgerRecorder(folder, ledger, SAMPLES, Stop())
    metrics = MetricsFile(folder / "metrics.jsonl")
    open_tickets: list[int] = []

    def take(actions: list[Action]) -> None:
        open_tickets.extend(
            action.ticket.number for action in actions if isinstance(action, IssueTicket)
        )

    opened = ledger.open_credit()
    await records.began(opened)
    take(opened)
    last = groups // RULES.groups_per_step
    while ledger.state.version < last:
        if ledger.full:
            taken = list(ledger.state.taken)
            actions = ledger.complete_step()
            await records.completed(taken, {entry.number for entry in taken}, actions)
            step = ledger.state.version
            metrics.write({"step": step, "time": 1e9 + step, **FIGURES, **count_tickets(ledger)})
            if step % CHECKPOINT_EVERY == 0 and step <= last - 3:
                await records.sync()
                _write_checkpoint(folder, ledger)
        else:
            number = open_tickets.pop(0)
            dead = number % 50 == 0
            version = ledger.state.live[number].min_version
            record = (
                TicketEnd(number, "env_error")
                if dead
                else GroupArrival(number, version, (0.0, 1.0))
            )
            entry = LogRecord(ledger.state.position + 1, None, "", number, PAYLOAD)
            actions = ledger.apply(record, entry.seq)
            await records.consumed(entry, RecordIntake(record), actions)
        take(actions)
    records.close()
    metrics.close()


def _write_checkpoint(folder: Path, ledger: Ledger) -> None:
    own = folder / "checkpoints" / checkpoint.name_of(ledger.state.version) / "learner"
    own.mkdir(parents=True)
    (own / PART).write_bytes(b"")
    body = {
        "format": checkpoint.FORMAT,
        "step": ledger.state.version,
        "epoch": 1,
        "ledger": ledger.dump(),
    }
    body["parts"] = [{"file": PART, "size": 0, "digest": ""}]
    (own / "learner.json").write_text(json.dumps(body))
    checkpoint.prune_checkpoints(folder / "checkpoints", 2)


def resume(folder: Path) -> dict[str, float]:
    """Open the files that grow with a run as a starting learner does; return seconds and memory in
    MiB.
    """
    began = time.monotonic()
    found = checkpoint.newest_checkpoint(folder / "checkpoints")
    assert found is not None
    ledger = Ledger.load(found.ledger)
    ahead = known_progress(folder, ledger)
    metrics = MetricsFile(folder / "metrics.jsonl", ledger.state.version)
    records = LedgerRecorder(folder, ledger, SAMPLES, Stop())
    took_s = time.monotonic() - began
    memory = _memory()
    if ahead.consumed <= ledger.state.position:
        why = f"nothing was left to cut: {ahead.consumed} records consumed, {ledger.state.position} in the checkpoint"
        raise RuntimeError(why)
    metrics.close()
    records.close()
    return {"resume_s": took_s, **memory}


def _memory() -> dict[str, float]:
    """This process's anonymous memory now, and the most memory it ever had, MiB."""
    rows = dict(row.split(":", 1) for row in Path("/proc/self/status").read_text().splitlines())
    return {name: int(rows[name].split()[0]) / 1024 for name in ("RssAnon", "VmHWM")}


def _in_child(what: str, folder: Path, groups: int) -> dict[str, float]:
    command = [sys.executable, "-m", "bench.scale.resume", what, str(folder), str(groups)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def measure() -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="rlearner-resume-") as scratch:
        found = {}
        for groups in (FEW, GROUPS):
            folder = Path(scratch) / str(groups)
            written = _in_child("write", folder, groups)
            found[groups] = _in_child("resume", folder, groups)
            print(
                f"resume: {groups} groups: written {written}, started {found[groups]}",
                file=sys.stderr,
            )
    extra = max(found[GROUPS][name] - found[FEW][name] for name in ("RssAnon", "VmHWM"))
    return {"resume_s": round(found[GROUPS]["resume_s"], 3), "resume_extra_mib": round(extra, 1)}


def main(what: str, folder: Path, groups: int) -> dict[str, float]:
    if what == "resume":
        return resume(folder)
    folder.mkdir()
    began = time.monotonic()
    asyncio.run(write(folder, groups))
    size = sum(os.path.getsize(path) for path in folder.rglob("*") if path.is_file())
    figures: dict[str, float] = {
        "seconds": round(time.monotonic() - began, 1),
        "cpu_s": round(time.process_time(), 1),
    }
    return figures | {"mib": round(size / 2**20)}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))))
