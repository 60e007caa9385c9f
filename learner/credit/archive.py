"""Archives the records that the learner consumed, byte for byte, in ``runs/<name>/samples/``.

With it (``samples.keep``) ``rlearner trace``, ``rlearner audit`` and a replay work without a
broker. A file is named by its first record's sequence and holds frames: magic, sequence, ticket
header, length, digest, then the record's bytes. ``<sequence>.paused`` marks that from there up to
the next file nothing was archived (``samples.keep`` was off). Records never change, so a frame
written twice is the same; a reader stops in a file where the next one begins. Files are bounded in
bytes and frames, so that finding a record costs the same however long the run.
"""

from __future__ import annotations

import os
import struct
import sys
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from broker.contract.streams import SAMPLES
from broker.jetstream.bus import LogRecord
from broker.jetstream.delivery import decode_message
from broker.system.private_files import open_private, private_folder, sync
from learner.credit.ledger_file import digest_record
from learner.credit.ledger_segments import write_at

FOLDER: Final = "samples"
SUFFIX: Final = ".frames"
PAUSED: Final = ".paused"
MAGIC: Final = b"RLS1"
# Finding a record reads the headers before it in its file, which takes about 20 ms.
MAX_FRAMES: Final = 2**14
# magic, sequence, ticket, bytes of the record, its digest
_HEADER: Final = struct.Struct("<4sQqI8s")
HEADER_BYTES: Final = _HEADER.size


@dataclass(frozen=True)
class ArchiveFrame:
    """One archived record; if ``error`` is set, the rest of its file is lost."""

    seq: int
    ticket: int  # from the record's header, 0 if absent
    data: bytes
    error: str = ""

    def record(self) -> LogRecord:
        """Return the record as the log reader would."""
        message, error = decode_message(self.data, SAMPLES.messages)
        return LogRecord(self.seq, message, error, self.ticket, self.data)


class SampleArchive:
    """Archive open for appending; one thread may append while another one syncs.

    Args:
        folder: ``runs/<name>/samples``.
        position: of the resumed ledger; records beyond it are cut off, to be consumed again.
        max_file_bytes: size at which a new file begins, if not at ``MAX_FRAMES``.
    """

    def __init__(self, folder: Path, position: int, max_file_bytes: int) -> None:
        self._folder = folder
        self._max_file_bytes = max_file_bytes
        self._file = -1
        self._size = 0
        self._frames = 0
        self.first_seq = 0  # of the open file
        self._finished_files: list[int] = []  # files left since the last sync
        private_folder(folder)
        truncate_after(folder, position)

    @property
    def is_full(self) -> bool:
        """Whether the next record begins a file."""
        return self._file < 0 or self._size >= self._max_file_bytes or self._frames >= MAX_FRAMES

    def append(self, record: LogRecord, record_digest: str) -> None:
        """Append a record with its digest; after an error, call again to overwrite the same place.

        Raises:
            OSError: if the folder cannot be written.
        """
        if self.is_full:
            path = self._folder / f"{record.seq:012d}{SUFFIX}"
            new_file = open_private(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            if self._file >= 0:
                self._finished_files.append(self._file)
            self._file = new_file
            self._size = 0
            self._frames = 0
            self.first_seq = record.seq
        header = _HEADER.pack(
            MAGIC, record.seq, record.ticket, len(record.data), bytes.fromhex(record_digest)
        )
        self._size += write_at(self._file, header + record.data, self._size)
        self._frames += 1

    def sync(self) -> None:
        """Make what was appended before the call survive a power loss."""
        # In this order: another thread may switch files now.
        current = self._file
        finished_files = list(self._finished_files)
        for file in [*finished_files, current]:
            if file >= 0:
                os.fsync(file)
        for file in finished_files:
            self._finished_files.remove(file)
            os.close(file)
        sync(self._folder)

    def close(self) -> None:
        for file in [*self._finished_files, self._file]:
            if file >= 0:
                os.close(file)
        self._finished_files = []
        self._file = -1


def archive_files(folder: Path) -> list[tuple[int, Path]]:
    """Return (first sequence, file), oldest first."""
    return sorted(
        (int(path.stem), path) for path in folder.glob(f"*{SUFFIX}") if path.stem.isdecimal()
    )


def mark_paused(folder: Path, position: int) -> None:
    """Mark, in an archive, that the following records are not archived (``samples.keep`` is off).

    Args:
        position: of the resumed ledger; records missing up to there were lost, not left out.

    Raises:
        OSError: if the folder cannot be written.
    """
    files = archive_files(folder)
    if not files or any(first > files[-1][0] for first in pause_marks(folder)):
        return
    with files[-1][1].open("rb") as file:
        end, last = _skip_frames(file, sys.maxsize)
    # A crash may have left half a frame.
    os.truncate(files[-1][1], end)
    (folder / f"{max(last, position) + 1:012d}{PAUSED}").touch(0o600)
    sync(folder)


def paused_ranges(folder: Path) -> list[tuple[int, int]]:
    """Return (first, last) sequence of each gap; ``last`` is huge if the gap is still open."""
    starts = [first for first, _ in archive_files(folder)]
    ends = {
        first: min((start for start in starts if start >= first), default=sys.maxsize)
        for first in pause_marks(folder)
    }
    return sorted((first, end - 1) for first, end in ends.items())


def pause_marks(folder: Path) -> dict[int, Path]:
    return {int(path.stem): path for path in folder.glob(f"*{PAUSED}") if path.stem.isdecimal()}


def truncate_after(folder: Path, position: int) -> None:
    """Remove every record beyond ``position``.

    Of the files that begin at or before it, only the newest is cut: readers ignore the others'
    overlap.
    """
    for first, path in pause_marks(folder).items():
        if first > position:
            path.unlink()
    for first, path in reversed(archive_files(folder)):
        if first > position:
            path.unlink()
            continue
        with path.open("rb") as file:
            end, _ = _skip_frames(file, position + 1)
        if end < path.stat().st_size:
            os.truncate(path, end)
        return


def read_frames(folder: Path, start: int = 1) -> Iterator[ArchiveFrame]:
    """Yield every record from sequence ``start`` on, in order; ignore half a frame at the end."""
    files = archive_files(folder)
    for i, (_, path) in enumerate(files):
        until = files[i + 1][0] if i + 1 < len(files) else 0
        if until and until <= start:
            continue
        is_complete = False
        for frame in _frames_of(path, start, is_last=not until):
            # The remaining frames are of an earlier incarnation.
            if until and (frame.seq >= until or (is_complete and frame.error)):
                break
            if frame.seq >= start or frame.error:
                yield frame
            is_complete = is_complete or frame.seq + 1 == until


def select_frames(folder: Path, seqs: Iterable[int]) -> Iterator[ArchiveFrame]:
    """Yield some records, in order, without reading the others; skip missing and damaged ones."""
    files = archive_files(folder)
    ordered = sorted(set(seqs))
    for i, (first, path) in enumerate(files):
        end = len(ordered)
        if i + 1 < len(files):
            end = bisect_left(ordered, files[i + 1][0])
        if selected := set(ordered[bisect_left(ordered, first) : end]):
            yield from _pick_from(path, selected)


def find_frame(folder: Path, seq: int) -> ArchiveFrame | None:
    """Return one record, None if it is missing."""
    return next(select_frames(folder, [seq]), None)


def _open_file(path: Path) -> BinaryIO:
    """Open a file, or an empty one if the learner has just removed it (``samples.keep``)."""
    try:
        return path.open("rb")
    except FileNotFoundError:
        return Path(os.devnull).open("rb")


def _pick_from(path: Path, seqs: set[int]) -> Iterator[ArchiveFrame]:
    with _open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        position = 0
        while (
            seqs
            and (header := read_header(os.pread(file.fileno(), _HEADER.size, position))) is not None
        ):
            seq, ticket, length, expected_digest = header
            position += _HEADER.size
            # A damaged length may be gigabytes.
            if position + length > size:
                return
            if seq in seqs:
                seqs.remove(seq)
                data = os.pread(file.fileno(), length, position)
                if bytes.fromhex(digest_record(data)) == expected_digest:
                    yield ArchiveFrame(seq, ticket, data)
            position += length


def _skip_frames(file: BinaryIO, start: int) -> tuple[int, int]:
    """Seek behind the records before ``start``; return that byte and the last of these records."""
    size = os.fstat(file.fileno()).st_size
    position = 0
    last = 0
    while (header := read_header(os.pread(file.fileno(), _HEADER.size, position))) is not None:
        next_position = position + _HEADER.size + header[2]
        if header[0] >= start or next_position > size:
            break
        position = next_position
        last = header[0]
    return file.seek(position), last


def read_header(data: bytes) -> tuple[int, int, int, bytes] | None:
    """Return a frame's header without its magic, None if ``data`` is not one."""
    if len(data) < _HEADER.size or not data.startswith(MAGIC):
        return None
    _, seq, ticket, length, check = _HEADER.unpack(data)
    return seq, ticket, length, check


def _frames_of(path: Path, start: int, *, is_last: bool) -> Iterator[ArchiveFrame]:
    """Yield the frames of one file from record ``start`` on."""
    with _open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        first_header = read_header(file.read(_HEADER.size))
        if first_header is not None and first_header[0] != int(path.stem):
            yield ArchiveFrame(
                0, 0, b"", error=f"{path.name}: begins with record {first_header[0]}"
            )
            return
        _, seq = _skip_frames(file, start)
        while (start_byte := file.tell()) < size:
            header = read_header(file.read(_HEADER.size))
            # A damaged length may be huge.
            data = file.read(header[2]) if header and header[2] <= size - start_byte else b""
            if header is None or len(data) < header[2]:
                if not is_last or (header is None and size - start_byte >= _HEADER.size):
                    yield ArchiveFrame(
                        seq,
                        0,
                        b"",
                        error=f"{path.name}: no frame at byte {start_byte}, after record {seq}",
                    )
                return
            seq, ticket, _, expected_digest = header
            if bytes.fromhex(digest_record(data)) != expected_digest:
                yield ArchiveFrame(
                    seq, 0, b"", error=f"{path.name}: the bytes of record {seq} are damaged"
                )
                return
            yield ArchiveFrame(seq, ticket, data)
