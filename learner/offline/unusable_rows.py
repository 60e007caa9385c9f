"""Counts rows of a data file that cannot be trained, and reports them once, with the first line
numbers.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from broker.errors import DataError

log = logging.getLogger(__name__)

_SHOWN: Final = 3


@dataclass
class UnusableRows:
    """The rows of one file that are left out or cut, by reason.

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
        """Note that the last row is left out."""
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
                log.warning(
                    "%s: %d of %d rows %s, %s",
                    self.path,
                    len(lines),
                    self.num_rows,
                    verb,
                    _where(reason, lines),
                )


def _where(reason: str, lines: list[int]) -> str:
    shown = ", ".join(map(str, lines[:_SHOWN]))
    return f"{reason}: {'lines' if len(lines) > 1 else 'line'} {shown}{', …' if len(lines) > _SHOWN else ''}"
