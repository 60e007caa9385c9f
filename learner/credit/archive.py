"""``runs/<name>/samples/``: the records that the learner consumed, byte for byte as they stood in the log (``samples.keep``).

From it ``rlearner trace``, ``rlearner audit`` and a replay work without a broker. A file is named by its first record's sequence and
holds frames: magic, sequence, ticket header, length, digest, then the record's bytes. ``<sequence>.paused`` says that from there
on, and up to the next file, nothing was archived (``samples.keep`` was off). Records of the log never change, so whoever
writes a frame twice writes the same one; a reader leaves a file where the next one begins. A file is bounded in bytes and in frames,
so that finding a record in it costs no more in an old run than in a young one.
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
from broker.jetstream.delivery import decode
from learner.credit.ledger_file import digest

FOLDER: Final = "samples"
SUFFIX: Final = ".frames"
PAUSED: Final = ".paused"
MAGIC: Final = b"RLS1"
MAX_FRAMES: Final = 2**14  # in one file: to find a record, the headers before it are read, about 20 ms
_HEADER: Final = struct.Struct("<4sQqI8s")  # magic, sequence, ticket, bytes of the record, its digest


@dataclass(frozen=True)
class Frame:
    """One archived record; with ``error`` set, what follows in its file is lost."""

    seq: int
    ticket: int  # from the record's header, 0 if absent
    data: bytes
    error: str = ""

    def record(self) -> LogRecord:
        """As the log's reader would have given it."""
        message, error = decode(self.data, SAMPLES.messages)
        return LogRecord(self.seq, message, error, self.ticket, self.data)


class Archive:
    """Open for appending; one thread may append while another one syncs.

    Args:
        folder: ``runs/<name>/samples``.
        position: of the resumed ledger; records beyond it are cut off, for they will be consumed again.
        max_file_bytes: a file is left for the next one once it is this large, or holds ``MAX_FRAMES``.
    """

    def __init__(self, folder: Path, position: int, max_file_bytes: int) -> None:
        self._folder, self._max = folder, max_file_bytes
        self._file = -1
        self._size = self._frames = 0
        self._done: list[int] = []  # files left since the last sync
        folder.mkdir(parents=True, exist_ok=True)
        cut(folder, position)

    def append(self, record: LogRecord, record_digest: str) -> None:
        """Write one, with the digest of its bytes; after an error, the same call again repeats it in the same place.

        Raises:
            OSError: no space, for example.
        """
        if self._file < 0 or self._size >= self._max or self._frames >= MAX_FRAMES:
            following = os.open(self._folder / f"{record.seq:012d}{SUFFIX}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            if self._file >= 0:
                self._done.append(self._file)
            self._file, self._size, self._frames = following, 0, 0
        frame = _HEADER.pack(MAGIC, record.seq, record.ticket, len(record.data), bytes.fromhex(record_digest)) + record.data
        start = 0
        while start < len(frame):
            start += os.pwrite(self._file, frame[start:], self._size + start)
        self._size += len(frame)
        self._frames += 1

    def sync(self) -> None:
        """What was appended before the call survives a power loss."""
        current, done = self._file, list(self._done)  # in this order: an append in another thread may leave the current file now
        for file in [*done, current]:
            if file >= 0:
                os.fsync(file)
        for file in done:
            self._done.remove(file)
            os.close(file)
        handle = os.open(self._folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def close(self) -> None:
        for file in [*self._done, self._file]:
            if file >= 0:
                os.close(file)
        self._done, self._file = [], -1


def files(folder: Path) -> list[tuple[int, Path]]:
    """(first sequence, file), oldest first."""
    return sorted((int(path.stem), path) for path in folder.glob(f"*{SUFFIX}") if path.stem.isdecimal())


def pause(folder: Path, position: int) -> None:
    """Note that a learner without ``samples.keep`` consumes what follows; does nothing where there is no archive.

    Args:
        position: of the resumed ledger; records up to there that are missing were lost, not left out.

    Raises:
        OSError: no space, for example.
    """
    found = files(folder)
    if not found or any(first > found[-1][0] for first in _pauses(folder)):
        return
    with found[-1][1].open("rb") as file:
        end, last = _skip(file, sys.maxsize)
    os.truncate(found[-1][1], end)  # half a frame of a crash
    (folder / f"{max(last, position) + 1:012d}{PAUSED}").touch()


def paused(folder: Path) -> list[tuple[int, int]]:
    """(first, last) sequence of each stretch that was not archived; open at the end: a very large number."""
    begins = [first for first, _ in files(folder)]
    return [(first, min((begin for begin in begins if begin >= first), default=sys.maxsize) - 1) for first in sorted(_pauses(folder))]


def _pauses(folder: Path) -> dict[int, Path]:
    return {int(path.stem): path for path in folder.glob(f"*{PAUSED}") if path.stem.isdecimal()}


def cut(folder: Path, position: int) -> None:
    """Remove every record beyond ``position``.

    Of the files that begin at or before it, only the newest is read: where an older one goes on behind the beginning of the next,
    nobody reads that.
    """
    for first, path in _pauses(folder).items():
        if first > position:
            path.unlink()
    for first, path in reversed(files(folder)):
        if first > position:
            path.unlink()
            continue
        with path.open("rb") as file:
            end, _ = _skip(file, position + 1)
        if end < path.stat().st_size:
            os.truncate(path, end)
        return


def frames(folder: Path, start: int = 1) -> Iterator[Frame]:
    """Every record from sequence ``start`` on, in order; half a frame at the very end is none."""
    found = files(folder)
    for i, (_, path) in enumerate(found):
        until = found[i + 1][0] if i + 1 < len(found) else 0
        if until and until <= start:
            continue
        whole = False
        for frame in _frames_of(path, start, is_last=not until):
            if until and (frame.seq >= until or (whole and frame.error)):  # what follows, an earlier incarnation went on to write
                break
            if frame.seq >= start or frame.error:
                yield frame
            whole = whole or frame.seq + 1 == until


def pick(folder: Path, seqs: Iterable[int]) -> Iterator[Frame]:
    """Some records, in order, without reading the others; those that are not there, or damaged, are left out."""
    found, wanted = files(folder), sorted(set(seqs))
    for i, (first, path) in enumerate(found):
        until = bisect_left(wanted, found[i + 1][0]) if i + 1 < len(found) else len(wanted)
        if here := set(wanted[bisect_left(wanted, first) : until]):
            yield from _pick_from(path, here)


def find(folder: Path, seq: int) -> Frame | None:
    """One record, None when it is not there."""
    return next(pick(folder, [seq]), None)


def _pick_from(path: Path, wanted: set[int]) -> Iterator[Frame]:
    with path.open("rb") as file:
        size, position = os.fstat(file.fileno()).st_size, 0
        while wanted and (header := _header(os.pread(file.fileno(), _HEADER.size, position))) is not None:
            seq, ticket, length, check = header
            position += _HEADER.size
            if position + length > size:  # a damaged length may say gigabytes
                return
            if seq in wanted:
                wanted.remove(seq)
                data = os.pread(file.fileno(), length, position)
                if bytes.fromhex(digest(data)) == check:
                    yield Frame(seq, ticket, data)
            position += length


def _skip(file: BinaryIO, start: int) -> tuple[int, int]:
    """Leave the file behind the frames of records before ``start``, found by their headers; that byte, and the last of these records."""
    size, position, last = os.fstat(file.fileno()).st_size, 0, 0
    while (header := _header(os.pread(file.fileno(), _HEADER.size, position))) is not None:
        behind = position + _HEADER.size + header[2]
        if header[0] >= start or behind > size:
            break
        position, last = behind, header[0]
    return file.seek(position), last


def _header(data: bytes) -> tuple[int, int, int, bytes] | None:
    """A frame's header without its magic, None where ``data`` is not one."""
    if len(data) < _HEADER.size or not data.startswith(MAGIC):
        return None
    _, seq, ticket, length, check = _HEADER.unpack(data)
    return seq, ticket, length, check


def _frames_of(path: Path, start: int, *, is_last: bool) -> Iterator[Frame]:
    """The frames of one file from record ``start`` on."""
    size = path.stat().st_size
    with path.open("rb") as file:
        begins_with = _header(file.read(_HEADER.size))
        if begins_with is not None and begins_with[0] != int(path.stem):
            yield Frame(0, 0, b"", error=f"{path.name}: begins with record {begins_with[0]}")
            return
        _, seq = _skip(file, start)
        while (begin := file.tell()) < size:
            header = _header(file.read(_HEADER.size))
            data = file.read(header[2]) if header and header[2] <= size - begin else b""  # a damaged length may say gigabytes
            if header is None or len(data) < header[2]:
                if not is_last or (header is None and size - begin >= _HEADER.size):
                    yield Frame(seq, 0, b"", error=f"{path.name}: no frame at byte {begin}, after record {seq}")
                return
            seq, ticket, _, check = header
            if bytes.fromhex(digest(data)) != check:
                yield Frame(seq, 0, b"", error=f"{path.name}: the bytes of record {seq} are damaged")
                return
            yield Frame(seq, ticket, data)
