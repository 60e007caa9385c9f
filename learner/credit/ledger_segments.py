"""Keeps the lines of the ledger file in ``runs/<name>/ledger/``, in files of a few MiB.

A file is named by the number of completed steps at which it begins, and begins with a ``summary``
of everything before, so that a start reads only the newest. A resumed learner takes the newest file
that holds its checkpoint's boundary, deletes the later ones, and cuts it behind that boundary. It
continues in a new file under the old name, so that an earlier incarnation that still runs writes to
an unlinked file.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from secrets import token_hex
from typing import Final

from broker.errors import UserError
from broker.system.private_files import private_folder, replace
from learner.credit import ledger_file
from learner.credit.ledger import Ledger
from learner.credit.ledger_file import LedgerLine, LedgerLineBuilder

log = logging.getLogger(__name__)

FOLDER: Final = "ledger"
SUFFIX: Final = ".jsonl"
# A file ends at the first boundary after this size: 25,000 lines, read in about 0.1 s.
MAX_BYTES: Final = 4 * 2**20


def segment_files(folder: Path) -> list[tuple[int, Path]]:
    """Return (completed steps where it begins, file) in ``runs/<name>/ledger``, oldest first.

    Raises:
        UserError: if an earlier version of rlearner wrote the run.
    """
    if (old := folder.with_suffix(SUFFIX)).exists():
        advice = "read or resume the run with that version, or choose a new run.name"
        raise UserError(f"{old}: written by an earlier version of rlearner; {advice}")
    named = [(path.stem.removeprefix("step-"), path) for path in folder.glob(f"step-*{SUFFIX}")]
    return sorted((int(number), path) for number, path in named if number.isdecimal())


class LedgerLines:
    """All lines of a run, oldest first, with one file at a time in memory.

    Args:
        folder: ``runs/<name>/ledger``.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.problem = ""  # why the last iteration ended early, empty if it did not

    def __iter__(self) -> Iterator[LedgerLine]:
        files = segment_files(self._folder)
        for i, (first, path) in enumerate(files):
            try:
                lines, self.problem = read_segment(path, first, is_last=i + 1 == len(files))
            # A resuming learner deletes the newest files first.
            except FileNotFoundError:
                return
            yield from lines
            if self.problem:
                return


def read_newest(folder: Path) -> tuple[list[LedgerLine], str]:
    """Return the lines of the newest file, and why one is unreadable; both empty without a file."""
    for first, path in reversed(segment_files(folder)):
        try:
            return read_segment(path, first, is_last=True)
        # A resuming learner deletes the newest files first.
        except FileNotFoundError:
            continue
    return [], ""


def read_segment(path: Path, first: int, *, is_last: bool) -> tuple[list[LedgerLine], str]:
    """Return the lines of one file, and why it cannot be read further.

    Args:
        first: completed steps where it begins.
        is_last: whether it may end in half a line, as the last file may.

    Raises:
        FileNotFoundError: if the file is deleted.
    """
    lines: list[LedgerLine] = []
    *rows, half_line = path.read_bytes().split(b"\n")
    for number, row in enumerate(rows, start=1):
        try:
            lines.append(ledger_file.decode_line(row))
        except ValueError as error:
            return lines, f"{path.name}:{number}: {error}"
    if not lines or lines[0].state not in ("summary", "unrecorded") or lines[0].step != first:
        return lines, f"{path.name}: does not begin with the summary of step {first}"
    if half_line and not is_last:
        return lines, f"{path.name}: ends in half a line"
    return lines, ""


def resume_file(
    folder: Path, ledger: Ledger, max_bytes: int = MAX_BYTES
) -> tuple[LedgerFile, list[LedgerLine]]:
    """Delete lines beyond the resumed ledger; return the file to continue in, and its lines.

    Raises:
        OSError: if the folder cannot be written.
    """
    first, lines = _kept_lines(folder, ledger)
    if lines[0].state == "unrecorded":
        problem = read_newest(folder)[1] or "files are missing"
        log.error(
            "%s: %s; the tickets before step %d are no longer recorded and cannot be audited",
            folder,
            problem,
            first,
        )
    private_folder(folder)
    # A crash may have left them.
    for path in folder.glob(".step-*"):
        path.unlink(missing_ok=True)
    # Newest first, so that the remaining files never have a gap.
    for begin, path in reversed(segment_files(folder)):
        if begin > first or lines[0].state == "unrecorded":
            path.unlink()
    return LedgerFile(folder, first, lines, max_bytes), lines


def _kept_lines(folder: Path, ledger: Ledger) -> tuple[int, list[LedgerLine]]:
    """Return the start of the newest file with the ledger's boundary, and the lines up to that."""
    version = ledger.state.version
    if not ledger.state.issued:
        return 0, [LedgerLineBuilder().summary(ledger.rules)]
    for first, path in reversed(segment_files(folder)):
        if first > version:
            continue
        lines, _ = read_segment(path, first, is_last=True)
        end = next(
            (
                i
                for i in range(len(lines), 0, -1)
                if ledger_file.is_boundary_of(lines[i - 1], ledger)
            ),
            0,
        )
        if end:
            return first, lines[:end]
        if first < version:
            # Older files end before this boundary.
            break
    return version, [
        LedgerLine(
            state="unrecorded", step=version, seq=ledger.state.position, counts=ledger.counts()
        )
    ]


class LedgerFile:
    """Newest file, open for appending; every write follows the last successful one.

    Args:
        folder: ``runs/<name>/ledger``.
        first: completed steps where the file begins.
        lines: its contents.
        max_bytes: size from which on a new file begins at the next boundary.
    """

    def __init__(
        self, folder: Path, first: int, lines: Sequence[LedgerLine], max_bytes: int = MAX_BYTES
    ) -> None:
        self._folder = folder
        self._max = max_bytes
        self._file = -1
        self._create(first, lines)

    @property
    def is_full(self) -> bool:
        return self._size >= self._max

    @property
    def has_name(self) -> bool:
        """Whether this is still the run's file; False once a later learner has taken over."""
        return bool(os.fstat(self._file).st_nlink)

    def append(self, data: bytes) -> None:
        """Append encoded lines; after an error, call again to overwrite the same place.

        Raises:
            OSError: if the file cannot be written.
        """
        self._size += write_at(self._file, data, self._size)

    def leave(self, first: int, summary: LedgerLine) -> None:
        """Continue in a new file; after an error, call again to repeat it.

        Args:
            first: completed steps, more than where this file begins.

        Raises:
            OSError: if the folder cannot be written.
        """
        # A later file on disk implies that this one is complete.
        self.sync()
        self._create(first, [summary])

    def sync(self) -> None:
        """Make what was appended survive a power loss."""
        os.fsync(self._file)

    def close(self) -> None:
        os.close(self._file)

    def _create(self, first: int, lines: Sequence[LedgerLine]) -> None:
        """Create a file of these lines atomically.

        It gets no name if the previous file has lost its own: a later learner has taken over.
        """
        name = f"step-{first:06d}{SUFFIX}"
        data = ledger_file.encode_lines(lines)
        temporary = self._folder / f".{name}-{token_hex(4)}"
        file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            write_at(file, data, 0)
            os.fsync(file)
            if self._file >= 0 and not self.has_name:
                os.unlink(temporary)
            else:
                replace(temporary, self._folder / name)
        except BaseException:
            os.close(file)
            temporary.unlink(missing_ok=True)
            raise
        if self._file >= 0:
            os.close(self._file)
        self.first = first
        self._file = file
        self._size = len(data)


def write_at(file: int, data: bytes, position: int) -> int:
    """Write all bytes from ``position`` of an open file on; return their number."""
    start = 0
    while start < len(data):
        start += os.pwrite(file, data[start:], position + start)
    return len(data)
