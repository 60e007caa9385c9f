"""Reads the ledger file once, and checks that it agrees with itself and the checkpoints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Final

from learner.credit.ledger import LOST
from learner.credit.ledger_file import FINAL, LedgerLine
from rlearner.audit.report import AuditReport, ranges

SUMS: Final = ("issued", *FINAL, "open", "duplicate", "unknown")
Ledgers = Mapping[int, Mapping[str, Any]]  # of checkpoints, by step


class LedgerAudit:
    """State accumulated from the lines.

    Attributes:
        issued: first line of each ticket.
        arrived: by ticket, the line of its group's record.
        ended: by ticket, every line that gave it a final state.
        records: by sequence, every line of a consumed record.
        boundaries: by step, the last line that ended it.
        counts: by step, the counts of every line that ended it; each learner that starts there
            opens the credit again.
        position: sequence of the newest consumed record.
        open: tickets that were issued and have no final state.
    """

    def __init__(
        self, lines: Iterable[LedgerLine], report: AuditReport, checkpoints: Ledgers | None = None
    ) -> None:
        self.issued: dict[int, LedgerLine] = {}
        self.arrived: dict[int, LedgerLine] = {}
        self.ended: dict[int, list[LedgerLine]] = {}
        self.records: dict[int, list[LedgerLine]] = {}
        self.boundaries: dict[int, LedgerLine] = {}
        self.counts: dict[int, list[Mapping[str, int]]] = {}
        self._report = report
        self._checkpoints = checkpoints or {}
        self.open: set[int] = set()
        self._held: dict[int, LedgerLine] = {}  # by open ticket, the line of its group's record
        self._sums: Counter[str] = Counter()
        self._reasons: Counter[str] = Counter()
        self._rules: Mapping[str, Any] = {}
        self._previous: LedgerLine | None = None
        self._matched: set[int] = set()
        self._shortfall = 0
        self._first_step = 0
        # fewer steps than before: groups of an unfinished step then stay open
        self._shortened = False
        # (groups_per_step, max_staleness) since the last boundary
        self._in_force: list[tuple[int, int]] = []
        # by step, all in force while it was made
        self._limits: dict[int, list[tuple[int, int]]] = {}
        for line in lines:
            self._apply(line)
        self.position = max(self.records, default=0)

    @property
    def version(self) -> int:
        """Steps completed."""
        return max(self.boundaries, default=0)

    @property
    def trained(self) -> dict[int, LedgerLine]:
        """Return the first line that trained each ticket."""
        found: dict[int, LedgerLine] = {}
        for number, lines in self.ended.items():
            for line in lines:
                if line.state == "trained":
                    found.setdefault(number, line)
        return found

    @property
    def done(self) -> bool:
        """Whether every step of the rules in force at the end of the file is made."""
        return bool(self._rules) and self.version >= self._rules["steps"]

    def max_staleness(self, step: int) -> int:
        """Return the loosest staleness bound of ``step``, -1 if unknown."""
        return max((staleness for _, staleness in self._limits.get(step, ())), default=-1)

    # ------------------------------------------------------------------------------------------------
    # reading

    def _apply(self, line: LedgerLine) -> None:
        fail = self._report.fail
        if line.state == "summary":
            self._summary(line)
            return
        before = self._rules
        self._rules = line.rules or self._rules
        if line.state == "unrecorded":
            self._first_step = line.step
            issued = line.counts.get("issued", 0)
            fail(
                f"the ledger file begins at step {line.step}: the states of tickets 1-{issued} are not recorded"
            )
        elif line.state == "boundary":
            self._boundary(line)
        elif line.state == "lost":
            self.arrived.pop(line.ticket, None)
            self._held.pop(line.ticket, None)
        elif line.state == "rules":
            self._in_force.append((line.rules["groups_per_step"], line.rules["max_staleness"]))
            self._shortened |= line.rules["steps"] < before.get("steps", 0)
            self.records.setdefault(line.seq, []).append(line)
        elif line.state == "issued":
            self._sums["issued"] += 1
            if line.ticket in self.issued:
                fail(f"ticket {line.ticket} was issued twice")
            self.issued.setdefault(line.ticket, line)
            if line.ticket not in self.ended:
                self.open.add(line.ticket)
        else:
            self._sums[line.state] += 1
            group = self.arrived.get(line.ticket)
            if line.seq and (line.state not in FINAL or group is None or group.seq != line.seq):
                self.records.setdefault(line.seq, []).append(line)
            if line.state == "arrived":
                self.arrived.setdefault(line.ticket, line)
                self._held.setdefault(line.ticket, line)
            elif line.state in FINAL:
                self.ended.setdefault(line.ticket, []).append(line)
                self.open.discard(line.ticket)
                self._held.pop(line.ticket, None)
                self._reasons[line.reason] += line.state == "dead"

    def _summary(self, line: LedgerLine) -> None:
        """Compare the first line of a file with the files before it."""
        end = self._previous or LedgerLine(state="boundary")
        if self._previous is None:
            self._rules = line.rules
        dead = {reason: count for reason, count in self._reasons.items() if count}
        same = {
            "the start": (line.step, line.seq, line.counts) == (end.step, end.seq, end.counts),
            "the waiting groups": line.held == tuple(self._held.values()),
            "why tickets died": (line.reasons or {}) == dead,
            "the rules": line.rules == self._rules,
        }
        if wrong := [what for what, is_same in same.items() if not is_same]:
            self._report.fail(
                f"the summary of step {line.step} and the lines before it disagree on {', '.join(wrong)}"
            )

    def _boundary(self, line: LedgerLine) -> None:
        report = self._report
        previous = self._previous
        self._previous = self.boundaries[line.step] = line
        now = (line.groups_per_step, line.max_staleness)
        self._limits[line.step] = [*self._limits.get(line.step, ()), *self._in_force, now]
        self._in_force = [now]
        self.counts.setdefault(line.step, []).append(line.counts)
        before = previous.step if previous else self._first_step
        if line.step not in (before, before + bool(previous)):
            report.fail(
                f"the ledger file has no end of step {before + bool(previous)} before that of step {line.step}"
            )
        found = {name: self._sums[name] for name in SUMS} | {"open": len(self.open)}
        counted = {name: line.counts.get(name, 0) for name in SUMS}
        wrong = [
            f"{name} {count} instead of {found[name]}"
            for name, count in counted.items()
            if count != found[name]
        ]
        if wrong:
            report.fail(f"step {line.step}: the ledger counted {', '.join(wrong)} that have a line")
            self._shortfall = max(
                self._shortfall, *(counted[name] - found[name] for name in ("issued", *FINAL))
            )
        if counted["issued"] != sum(counted[name] for name in (*FINAL, "open")):
            report.fail(
                f"step {line.step}: issued is not trained + filtered + dropped + dead + open: {line.counts}"
            )
        if (state := self._checkpoints.get(line.step)) is not None:
            self._compare(line, state)

    def _compare(self, line: LedgerLine, state: Mapping[str, Any]) -> None:
        """Compare a checkpoint with the lines up to its step."""
        if (state["position"], state["issued"]) != (line.seq, line.counts.get("issued")):
            # it belongs to another boundary of the same step, as a later start opened the credit
            # again
            return
        self._matched.add(line.step)
        fail = self._report.fail
        for name in FINAL:
            counted = state[name] + (state.get("unselected", 0) if name == "filtered" else 0)
            if counted != self._sums[name]:
                fail(
                    f"checkpoint {line.step} counts {counted} tickets {name}, the ledger file {self._sums[name]}"
                )
        live = {int(number) for number in state["live"]}
        here = self.open
        what = f"checkpoint {line.step}"
        self._report.fail_all(
            f"{what} holds tickets {{}} that the ledger file has ended", live - here
        )
        self._report.fail_all(
            f"{what} has ended tickets {{}} that the ledger file has open", here - live
        )
        queued = {
            int(entry["number"]): int(entry["seq"]) for entry in state["taken"] + state["queue"]
        }
        arrived = {number: group.seq for number, group in self._held.items()}
        if queued != arrived and live == here:
            fail(f"{what} holds groups {queued} (ticket: record), the ledger file {arrived}")

    # -----------------------------------------------------------------------------------------------
    # checking

    def check(self) -> None:
        """Check the whole file; once all steps are made, no ticket may be open."""
        report = self._report
        self._check_tickets()
        self._check_records()
        self._check_steps()
        for step in self._checkpoints.keys() - self._matched:
            report.fail(f"checkpoint {step} matches no boundary of the ledger file")
        if lost := {number for number, lines in self.ended.items() if lines[0].reason == LOST}:
            report.notes.append(
                f"rebase: the broker had lost its store; tickets {ranges(lost)} were counted dead"
            )
        counts = {
            state: sum(1 for lines in self.ended.values() if lines[0].state == state)
            for state in FINAL
        }
        report.counts = {"tickets": len(self.issued), **counts, "open": len(self.open)}
        report.lost_records += max(0, self._shortfall - len(report.lost) - report.lost_records)

    def _check_tickets(self) -> None:
        report = self._report
        newest = max([*self.issued, *self.ended], default=0)
        if missing := set(range(1, newest + 1)) - self.issued.keys():
            report.lost |= missing
            report.fail_all("tickets {} have no line that issued them", missing)
        for number, lines in sorted(self.ended.items()):
            if len(lines) > 1:
                report.fail(
                    f"ticket {number} ended {len(lines)} times: {', '.join(line.state for line in lines)}"
                )
            if sum(line.state == "trained" for line in lines) > 1:
                report.trained_twice.add(number)
        unfinished = self.open - (self._held.keys() if self._shortened else set())
        if self.done and unfinished:
            report.lost |= unfinished
            report.fail_all(
                f"all {self.version} steps are made, but tickets {{}} have no final state",
                unfinished,
            )

    def _check_records(self) -> None:
        report = self._report
        first = min(self.records, default=1)
        missing = (
            set(range(first if self._first_step else 1, self.position + 1)) - self.records.keys()
        )
        report.fail_all("records {} of the samples log have no line in the ledger file", missing)
        report.lost_records += len(missing)
        for seq, lines in sorted(self.records.items()):
            if len(lines) > 1:
                tickets = ", ".join(str(line.ticket) for line in lines)
                report.fail(f"record {seq} was consumed {len(lines)} times, for tickets {tickets}")

    def _check_steps(self) -> None:
        trained: dict[int, list[LedgerLine]] = {}
        for line in self.trained.values():
            trained.setdefault(line.step, []).append(line)
        made_of = Counter(lines[0].step for lines in self.ended.values())
        first = min(self.boundaries, default=0)
        most_staleness = most_groups = 0
        for step, end in sorted(self.boundaries.items()):
            most_staleness = max(most_staleness, end.max_staleness)
            most_groups = max(most_groups, end.groups_per_step)
            self._check_step(step, trained.get(step, []), (1 + most_staleness) * most_groups)
            sizes = [size for size, _ in self._limits[step]]
            if step and step != first and not min(sizes) <= made_of[step] <= max(sizes):
                made = f"step {step} was made of {made_of[step]} groups"
                self._report.fail(f"{made}, train.groups_per_step is {end.groups_per_step}")

    def _check_step(self, step: int, trained: list[LedgerLine], credit: int) -> None:
        """Check one step: the lines of the groups that it trained, and at most ``credit`` open
        tickets after it.
        """
        report = self._report
        end = self.boundaries[step]
        for line in trained:
            check_staleness(
                report, line, line.oldest, line.newest, self.max_staleness(step), "the ledger file"
            )
            group = self.arrived.get(line.ticket)
            if group is None or (group.seq, group.digest) != (line.seq, line.digest):
                missing = f"no record {line.seq} of it had arrived"
                report.fail(f"ticket {line.ticket} was trained in step {step}, but {missing}")
        if end.counts.get("open", 0) > credit:
            report.fail(
                f"after step {step} {end.counts['open']} tickets are open, credit allows {credit}"
            )


def check_staleness(
    report: AuditReport, line: LedgerLine, oldest: int, newest: int, bound: int, source: str
) -> None:
    """Check a trained group's token versions, as one source gives them (-1: it sampled none)."""
    version = line.step - 1  # the version that was trained
    what = f"ticket {line.ticket}, trained in step {line.step}: {source} has a token of version"
    if oldest >= 0 and bound >= 0 and version - oldest > bound:
        report.fail(f"{what} {oldest}, the bound is {bound}")
    if newest > version:
        report.fail(f"{what} {newest}, newer than that")
