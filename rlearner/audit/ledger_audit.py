"""Reads the ledger file once, and checks that it agrees with itself and the checkpoints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Final

from broker.contract.staleness import is_late
from learner.credit.ledger import LOST
from learner.credit.ledger_file import FINAL, LedgerLine
from rlearner.audit.report import AuditReport, format_ranges

# The counts of a boundary line that the lines before it must add up to.
SUMS: Final = ("issued", *FINAL, "open", "duplicate", "unknown")
# The ledgers of checkpoints, by step.
Ledgers = Mapping[int, Mapping[str, Any]]


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
        self._waiting: dict[int, LedgerLine] = {}  # by open ticket, the line of its group's record
        self._sums: Counter[str] = Counter()
        self._reasons: Counter[str] = Counter()
        self._rules: Mapping[str, Any] = {}
        self._previous: LedgerLine | None = None
        self._matched: set[int] = set()
        self._shortfall = 0
        self._first_step = 0
        # The run was given fewer steps: groups of an unfinished step then stay open.
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
        first_lines: dict[int, LedgerLine] = {}
        for number, lines in self.ended.items():
            for line in lines:
                if line.state == "trained":
                    first_lines.setdefault(number, line)
        return first_lines

    @property
    def is_done(self) -> bool:
        """Whether every step of the rules in force at the end of the file is made."""
        return bool(self._rules) and self.version >= self._rules["steps"]

    def max_staleness(self, step: int) -> int:
        """Return the loosest staleness bound of ``step``, -1 if unknown."""
        return max((staleness for _, staleness in self._limits.get(step, ())), default=-1)

    def _apply(self, line: LedgerLine) -> None:
        fail = self._report.fail
        if line.state == "summary":
            self._summary(line)
            return
        previous_rules = self._rules
        self._rules = line.rules or self._rules
        if line.state == "unrecorded":
            self._first_step = line.step
            issued = line.counts.get("issued", 0)
            fail(
                f"the ledger file begins at step {line.step}: "
                f"the states of tickets 1-{issued} are not recorded"
            )
        elif line.state == "boundary":
            self._boundary(line)
        elif line.state == "lost":
            self.arrived.pop(line.ticket, None)
            self._waiting.pop(line.ticket, None)
        elif line.state == "rules":
            self._in_force.append((line.rules["groups_per_step"], line.rules["max_staleness"]))
            self._shortened |= line.rules["steps"] < previous_rules.get("steps", 0)
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
                self._waiting.setdefault(line.ticket, line)
            elif line.state in FINAL:
                self.ended.setdefault(line.ticket, []).append(line)
                self.open.discard(line.ticket)
                self._waiting.pop(line.ticket, None)
                self._reasons[line.reason] += line.state == "dead"

    def _summary(self, line: LedgerLine) -> None:
        """Compare the first line of a file with the files before it."""
        end = self._previous or LedgerLine(state="boundary")
        if self._previous is None:
            self._rules = line.rules
        dead = {reason: count for reason, count in self._reasons.items() if count}
        comparisons = {
            "the start": (line.step, line.seq, line.counts) == (end.step, end.seq, end.counts),
            "the waiting groups": line.held == tuple(self._waiting.values()),
            "why tickets died": (line.reasons or {}) == dead,
            "the rules": line.rules == self._rules,
        }
        if differing := [subject for subject, is_equal in comparisons.items() if not is_equal]:
            self._report.fail(
                f"the summary of step {line.step} and the lines before it "
                f"disagree on {', '.join(differing)}"
            )

    def _boundary(self, line: LedgerLine) -> None:
        report = self._report
        previous = self._previous
        self._previous = self.boundaries[line.step] = line
        now = (line.groups_per_step, line.max_staleness)
        self._limits[line.step] = [*self._limits.get(line.step, ()), *self._in_force, now]
        self._in_force = [now]
        self.counts.setdefault(line.step, []).append(line.counts)
        previous_step = previous.step if previous else self._first_step
        # A learner that starts again repeats the boundary that it starts at.
        next_step = previous_step + bool(previous)
        if line.step not in (previous_step, next_step):
            report.fail(
                f"the ledger file has no end of step {next_step} before that of step {line.step}"
            )
        sums = {name: self._sums[name] for name in SUMS} | {"open": len(self.open)}
        counts = {name: line.counts.get(name, 0) for name in SUMS}
        wrong = [
            f"{name} {count} instead of {sums[name]}"
            for name, count in counts.items()
            if count != sums[name]
        ]
        if wrong:
            report.fail(f"step {line.step}: the ledger counted {', '.join(wrong)} that have a line")
            self._shortfall = max(
                self._shortfall, *(counts[name] - sums[name] for name in ("issued", *FINAL))
            )
        if counts["issued"] != sum(counts[name] for name in (*FINAL, "open")):
            report.fail(
                f"step {line.step}: issued is not trained + filtered + dropped + dead + open: "
                f"{line.counts}"
            )
        if (state := self._checkpoints.get(line.step)) is not None:
            self._compare(line, state)

    def _compare(self, line: LedgerLine, state: Mapping[str, Any]) -> None:
        """Compare a checkpoint with the lines up to its step."""
        if (state["position"], state["issued"]) != (line.seq, line.counts.get("issued")):
            # It belongs to another boundary of this step: a later start opened the credit again.
            return
        self._matched.add(line.step)
        fail = self._report.fail
        for name in FINAL:
            count = state[name]
            if name == "filtered":
                count += state.get("unselected", 0)
            if count != self._sums[name]:
                fail(
                    f"checkpoint {line.step} counts {count} tickets {name}, "
                    f"the ledger file {self._sums[name]}"
                )
        live = {int(number) for number in state["live"]}
        open_tickets = self.open
        subject = f"checkpoint {line.step}"
        self._report.fail_all(
            f"{subject} holds tickets {{}} that the ledger file has ended", live - open_tickets
        )
        self._report.fail_all(
            f"{subject} has ended tickets {{}} that the ledger file has open", open_tickets - live
        )
        queued = {
            int(entry["number"]): int(entry["seq"]) for entry in state["taken"] + state["queue"]
        }
        arrived = {number: group.seq for number, group in self._waiting.items()}
        if queued != arrived and live == open_tickets:
            fail(f"{subject} holds groups {queued} (ticket: record), the ledger file {arrived}")

    def check(self) -> None:
        """Check the whole file; once all steps are made, no ticket may be open."""
        report = self._report
        self._check_tickets()
        self._check_records()
        self._check_steps()
        for step in self._checkpoints.keys() - self._matched:
            report.fail(f"checkpoint {step} matches no boundary of the ledger file")
        if lost_tickets := {
            number for number, lines in self.ended.items() if lines[0].reason == LOST
        }:
            report.notes.append(
                "rebase: the broker had lost its store; "
                f"tickets {format_ranges(lost_tickets)} were counted dead"
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
                states = ", ".join(line.state for line in lines)
                report.fail(f"ticket {number} ended {len(lines)} times: {states}")
            if sum(line.state == "trained" for line in lines) > 1:
                report.trained_twice.add(number)
        unfinished = set(self.open)
        if self._shortened:
            unfinished -= self._waiting.keys()
        if self.is_done and unfinished:
            report.lost |= unfinished
            report.fail_all(
                f"all {self.version} steps are made, but tickets {{}} have no final state",
                unfinished,
            )

    def _check_records(self) -> None:
        report = self._report
        # A ledger file of a run that began without one starts with a later record.
        first = min(self.records, default=1) if self._first_step else 1
        missing = set(range(first, self.position + 1)) - self.records.keys()
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
        num_groups = Counter(lines[0].step for lines in self.ended.values())
        first = min(self.boundaries, default=0)
        most_staleness = most_groups = 0
        for step, end in sorted(self.boundaries.items()):
            most_staleness = max(most_staleness, end.max_staleness)
            most_groups = max(most_groups, end.groups_per_step)
            self._check_step(step, trained.get(step, []), (1 + most_staleness) * most_groups)
            sizes = [size for size, _ in self._limits[step]]
            if step and step != first and not min(sizes) <= num_groups[step] <= max(sizes):
                self._report.fail(
                    f"step {step} was made of {num_groups[step]} groups, "
                    f"train.groups_per_step is {end.groups_per_step}"
                )

    def _check_step(self, step: int, trained: list[LedgerLine], credit: int) -> None:
        """Check the groups that a step trained, and that at most ``credit`` tickets were open."""
        report = self._report
        end = self.boundaries[step]
        for line in trained:
            check_staleness(
                report,
                line,
                line.oldest,
                newest=line.newest,
                bound=self.max_staleness(step),
                source="the ledger file",
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
    subject = f"ticket {line.ticket}, trained in step {line.step}: {source} has a token of version"
    if oldest >= 0 and bound >= 0 and is_late(oldest, version, bound):
        report.fail(f"{subject} {oldest}, the bound is {bound}")
    if newest > version:
        report.fail(f"{subject} {newest}, newer than that")
