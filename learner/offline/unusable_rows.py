"""Counts rows of a data set: those that cannot be trained, with their lines, and duplicates."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Final

from broker.errors import DataError
from rlearner_text.rows.columns import Row, digest_row

log = logging.getLogger(__name__)

_LINES_IN_REPORT: Final = 3
# Reasons, or their end, that the summary counts.
EMPTY: Final = "the answer is empty"
LONG: Final = "beyond data.max_tokens, or the model's limit"


@dataclass
class UnusableRows:
    """Rows of one data set that are omitted or cut, by reason.

    Attributes:
        path: of the data set.
        num_rows: rows read so far.
        num_duplicates: how many of them equal an earlier one.
        last_line: the number of the last one.
        omitted, cut: reason -> line numbers.
    """

    path: str
    num_rows: int = 0
    num_duplicates: int = 0
    last_line: int = 0
    omitted: dict[str, list[int]] = field(default_factory=dict)
    cut: dict[str, list[int]] = field(default_factory=dict)
    _digests: set[bytes] = field(default_factory=set)

    def read(self, line: int, row: Row) -> None:
        """Count a row."""
        self.num_rows += 1
        self.last_line = line
        digest = digest_row(row)
        self.num_duplicates += digest in self._digests
        self._digests.add(digest)

    def omit(self, reason: str) -> None:
        """Note that the last row is omitted."""
        self.omitted.setdefault(reason, []).append(self.last_line)

    def shorten(self, reason: str) -> None:
        """Note that the last row is cut."""
        self.cut.setdefault(reason, []).append(self.last_line)

    def summary(self) -> str:
        """Return the counts in one line."""
        num_empty = len(self.omitted.get(EMPTY, ()))
        num_long = sum(map(len, self.cut.values()))
        num_long += sum(len(rows) for reason, rows in self.omitted.items() if reason.endswith(LONG))
        counts = f"{self.num_rows} rows, {self.num_duplicates} duplicates"
        return f"{self.path}: {counts}, {num_empty} without an answer, {num_long} too long"

    def report(self, problem: str) -> None:
        """Log the counts, and one warning for each reason.

        Args:
            problem: the error if no row is left, which the reason follows.

        Raises:
            DataError: if no row is left.
        """
        if sum(map(len, self.omitted.values())) == self.num_rows:
            reason = next(iter(self.omitted), "the file is empty")
            raise DataError(self.path, self.last_line, f"{problem}: {reason}")
        log.info("%s", self.summary())
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
