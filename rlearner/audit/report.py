"""What an audit found."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

SHOWN: Final = 8  # ranges named in one line


@dataclass
class Report:
    """Grows while the checks run.

    Attributes:
        counts: tickets by what became of them, from the ledger file's own lines.
        lost: tickets that were granted, or had a record, and neither have an end nor a record that could give them one.
        lost_records: records that nobody can tell the ticket of.
        trained_twice: tickets that were trained more than once.
        not_archived: records that the learner consumed while ``samples.keep`` was off, after it had been on.
        problems: one line each; the audit fails when there is one.
        notes: what was compared with what, and what could not be.
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

    def fail_all(self, what: str, numbers: Iterable[int]) -> None:
        """One line for all of them, none when there are none; ``{}`` in ``what`` becomes their numbers."""
        if found := set(numbers):
            self.fail(what.format(ranges(found)))

    def to_json(self) -> dict[str, Any]:
        """The published keys, and the lines for people."""
        names = ("tickets", "trained", "filtered", "dropped", "dead", "open")
        figures: dict[str, Any] = {name: self.counts.get(name, 0) for name in names}
        figures |= {"lost": len(self.lost) + self.lost_records, "trained_twice": len(self.trained_twice)}
        return figures | {"not_archived": self.not_archived, "ok": self.ok, "problems": self.problems, "notes": self.notes}


def ranges(numbers: Iterable[int]) -> str:
    """``1-3, 7`` for {1, 2, 3, 7}; the first few of them."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    named = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    return ", ".join(named[:SHOWN]) + (f" and {len(named) - SHOWN} more places" if len(named) > SHOWN else "")
