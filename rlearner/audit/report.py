"""The report of an audit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

# A problem stays one line, however many tickets it is about.
MAX_RANGES: Final = 8


@dataclass
class AuditReport:
    """Results of the checks, filled while they run.

    Attributes:
        counts: tickets by state, from the lines of the ledger file.
        lost: tickets that were issued or had a record, but have neither a final state nor a record
            that could give one.
        lost_records: lost records of unknown tickets.
        trained_twice: tickets that were trained more than once.
        not_archived: records that the learner consumed while ``samples.keep`` was off, after it had
            been on.
        problems: one line each; the audit fails if there is one.
        notes: what was compared, and what could not be.
    """

    counts: dict[str, int] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)
    lost_records: int = 0
    trained_twice: set[int] = field(default_factory=set)
    not_archived: int = 0
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.problems and not self.lost and not self.trained_twice

    def fail(self, problem: str) -> None:
        self.problems.append(problem)

    def fail_all(self, template: str, numbers: Iterable[int]) -> None:
        """Add one problem for all ``numbers``, if any; ``{}`` becomes their ranges."""
        if distinct := set(numbers):
            self.fail(template.format(format_ranges(distinct)))

    def to_json(self) -> dict[str, Any]:
        """Return the counts, problems and notes by their published keys."""
        # These keys are the published output of `rlearner audit --json`.
        names = ("tickets", "trained", "filtered", "dropped", "dead", "open")
        figures: dict[str, Any] = {name: self.counts.get(name, 0) for name in names}
        figures |= {
            "lost": len(self.lost) + self.lost_records,
            "trained_twice": len(self.trained_twice),
        }
        figures |= {"not_archived": self.not_archived, "ok": self.ok}
        return figures | {"problems": self.problems, "notes": self.notes}


def format_ranges(numbers: Iterable[int]) -> str:
    """Return ``1-3, 7`` for {1, 2, 3, 7}, at most ``MAX_RANGES`` ranges."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    names = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    text = ", ".join(names[:MAX_RANGES])
    if len(names) > MAX_RANGES:
        text += f" and {len(names) - MAX_RANGES} more places"
    return text
