"""Counts rows of a data file that cannot be trained, and reports them once."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from broker.errors import DataError

log = logging.getLogger(__name__)

_LINES_IN_REPORT: Final = 3


@dataclass
class UnusableRows:
    """Rows of one file that are omitted or cut, by reason.

    Attributes:
        path: of the file.
        num_rows: rows read so far.
        last_line: the number of the last one.
        omitted, cut: reason -> line numbers.
    """

    path: str | Path
    num_rows: int = 0
    last_line: int = 0
    omitted: dict[str, list[int]] = field(default_factory=dict)
    cut: dict[str, list[int]] = field(default_factory=dict)

    def read(self, line: int) -> None:
        """Count a row."""
        self.num_rows += 1
        self.last_line = line

    def omit(self, reason: str) -> None:
        """Note that the last row is omitted."""
        self.omitted.setdefault(reason, []).append(self.last_line)

    def shorten(self, reason: str) -> None:
        """Note that the last row is cut."""
        self.cut.setdefault(reason, []).append(self.last_line)

    def report(self, problem: str) -> None:
        """Log one warning for each reason.

        Args:
            problem: the error if no row is left, which the reason follows.

        Raises:
            DataError: if no row is left.
        """
        if sum(map(len, self.omitted.values())) == self.num_rows:
            reason = next(iter(self.omitted), "the file is empty")
            raise DataError(str(self.path), self.last_line, f"{problem}: {reason}")
        for verb, reasons in (("omitted", self.omitted), ("cut", self.cut)):
            for reason, lines in reasons.items():
                count = f"{len(lines)} of {self.num_rows} rows {verb}"
                log.warning("%s: %s, %s", self.path, count, _format_lines(reason, lines))


def _format_lines(reason: str, lines: list[int]) -> str:
    numbers = ", ".join(map(str, lines[:_LINES_IN_REPORT]))
    if len(lines) > _LINES_IN_REPORT:
        numbers += ", …"
    noun = "lines" if len(lines) > 1 else "line"
    return f"{reason}: {noun} {numbers}"
