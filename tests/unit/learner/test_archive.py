"""The archive of consumed records: the same bytes, no more and no less, and damage that is named."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import run_folder_kit as kit

from broker.jetstream.bus import LogRecord
from learner.credit import archive
from learner.credit.archive import (
    SampleArchive,
    archive_files,
    find_frame,
    read_frames,
    select_frames,
    truncate_after,
)
from learner.credit.ledger_file import digest_record


def record(seq: int, size: int = 100) -> LogRecord:
    return LogRecord(seq, None, "no message", seq + 100, bytes([seq]) * size)


def write(folder: Path, *seqs: int, position: int = 0, max_file_bytes: int = 300) -> None:
    opened = SampleArchive(folder, position, max_file_bytes)
    for seq in seqs:
        opened.append(record(seq), digest_record(record(seq).data))
    opened.sync()
    opened.close()


def held(folder: Path, start: int = 1) -> list[int]:
    found = list(read_frames(folder, start))
    assert all(not frame.error for frame in found)
    assert all(
        (frame.ticket, frame.data) == (frame.seq + 100, bytes([frame.seq]) * 100) for frame in found
    )
    return [frame.seq for frame in found]


def test_files_of_bounded_size(tmp_path: Path) -> None:
    write(tmp_path, *range(1, 8))
    # a frame is 32 + 100 bytes; a file is left once it holds 300
    assert [(first, path.stat().st_size) for first, path in archive_files(tmp_path)] == [
        (1, 396),
        (4, 396),
        (7, 132),
    ]
    assert held(tmp_path) == [1, 2, 3, 4, 5, 6, 7]
    assert held(tmp_path, 5) == [5, 6, 7]
    frame = find_frame(tmp_path, 6)
    assert frame is not None
    assert frame.data == bytes([6]) * 100
    assert find_frame(tmp_path, 8) is None


@pytest.mark.parametrize("position", range(8))
def test_a_resumed_learner_cuts_what_it_reads_again(tmp_path: Path, position: int) -> None:
    write(tmp_path, *range(1, 8))
    newest = archive_files(tmp_path)[-1][1]
    newest.write_bytes(newest.read_bytes() + b"RLS1 half a frame")
    truncate_after(tmp_path, position)
    assert held(tmp_path) == list(range(1, position + 1))
    write(tmp_path, *range(position + 1, 10), position=position)
    assert held(tmp_path) == list(range(1, 10))


def test_a_file_is_bounded_in_frames_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "MAX_FRAMES", 3)
    write(tmp_path, *range(1, 8), max_file_bytes=1 << 20)
    assert [first for first, _ in archive_files(tmp_path)] == [1, 4, 7]
    assert held(tmp_path) == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("moment", [1, 2, 3])
def test_a_sync_while_a_file_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: int
) -> None:
    """Another thread appends, and leaves a file, while the sync has done half its work: what was
    there before is synced nevertheless.
    """
    opened, synced, real = SampleArchive(tmp_path, 0, 1), list[str](), os.fsync

    def fsync(file: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{file}"))
        real(file)
        if len(synced) == moment:
            opened.append(record(3), digest_record(record(3).data))

    for seq in (1, 2):
        opened.append(record(seq), digest_record(record(seq).data))
    monkeypatch.setattr(os, "fsync", fsync)
    opened.sync()
    assert {str(path) for first, path in archive_files(tmp_path) if first < 3} <= set(synced)
    synced.clear()
    opened.sync()
    assert str(tmp_path / "000000000003.frames") in synced
    opened.close()
    assert held(tmp_path) == [1, 2, 3]


@pytest.mark.parametrize(("position", "kept"), [(5, [4, 5]), (6, [4, 5, 6]), (7, [7])])
def test_a_cut_reads_no_older_file(tmp_path: Path, position: int, kept: list[int]) -> None:
    write(tmp_path, *range(1, 8))
    older = [path for first, path in archive_files(tmp_path) if first < kept[0]]
    for path in older:
        path.write_bytes(b"gibberish")
    truncate_after(tmp_path, position)
    assert [path.read_bytes() for path in older] == [b"gibberish"] * len(older)
    assert [frame.seq for frame in read_frames(tmp_path, kept[0])] == kept


def test_a_record_is_found_without_reading_those_before_it(tmp_path: Path) -> None:
    write(tmp_path, *range(1, 8))
    _, path = archive_files(tmp_path)[1]
    damaged = bytearray(path.read_bytes())
    damaged[40] ^= 1
    path.write_bytes(damaged)
    assert find_frame(tmp_path, 4) is None
    frame = find_frame(tmp_path, 6)
    assert frame is not None
    assert frame.data == bytes([6]) * 100
    assert [(frame.seq, frame.error) for frame in read_frames(tmp_path, 5)] == [
        (5, ""),
        (6, ""),
        (7, ""),
    ]


def test_some_records_are_picked_from_several_files(tmp_path: Path) -> None:
    write(tmp_path, *range(1, 8))
    assert [
        (frame.seq, frame.data[0]) for frame in select_frames(tmp_path, [9, 6, 2, 7, 4, 2])
    ] == [
        (2, 2),
        (4, 4),
        (6, 6),
        (7, 7),
    ]
    _, newest = archive_files(tmp_path)[-1]
    newest.write_bytes(newest.read_bytes()[:-1])
    _, damaged = archive_files(tmp_path)[1]
    damaged.write_bytes(damaged.read_bytes().replace(bytes([4]) * 100, bytes([5]) * 100))
    assert [frame.seq for frame in select_frames(tmp_path, range(1, 8))] == [1, 2, 3, 5, 6]
    assert list(select_frames(tmp_path / "none", [1])) == []


def test_half_a_frame_at_the_end_is_none(tmp_path: Path) -> None:
    write(tmp_path, 1, 2, max_file_bytes=10_000)
    path = archive_files(tmp_path)[0][1]
    whole = path.read_bytes()
    for size in range(132, 264):
        path.write_bytes(whole[:size])
        assert held(tmp_path) == [1]


def test_what_an_earlier_incarnation_goes_on_to_write_is_not_read(tmp_path: Path) -> None:
    zombie = SampleArchive(tmp_path, 0, 10_000)
    for seq in (1, 2, 3):
        zombie.append(record(seq), digest_record(record(seq).data))
    write(tmp_path, 2, 3, 4, position=1)
    # behind a hole in its own file, which the new incarnation has left
    zombie.append(record(4), digest_record(record(4).data))
    zombie.close()
    assert [path.name for _, path in archive_files(tmp_path)] == [
        "000000000001.frames",
        "000000000002.frames",
    ]
    assert held(tmp_path) == [1, 2, 3, 4]


def test_nor_what_it_writes_behind_a_hole(tmp_path: Path) -> None:
    """The new incarnation begins at a later record than the file, so the file stays, cut: the
    zombie's next frame leaves a hole.
    """
    zombie = SampleArchive(tmp_path, 0, 10_000)
    for seq in (1, 2, 3):
        zombie.append(record(seq), digest_record(record(seq).data))
    write(tmp_path, 3, 4, position=2)
    zombie.append(record(4), digest_record(record(4).data))
    zombie.close()
    _, path = archive_files(tmp_path)[0]
    assert path.stat().st_size == 4 * 132
    assert held(tmp_path) == [1, 2, 3, 4]


def test_damage_is_named(tmp_path: Path) -> None:
    write(tmp_path, *range(1, 8))
    _, path = archive_files(tmp_path)[1]
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[132 + 40] ^= 1
    path.write_bytes(bytes(flipped))
    assert [(frame.seq, frame.error) for frame in read_frames(tmp_path) if frame.error] == [
        (5, "000000000004.frames: the bytes of record 5 are damaged")
    ]
    path.write_bytes(whole[:200])
    assert [frame.error for frame in read_frames(tmp_path) if frame.error] == [
        "000000000004.frames: no frame at byte 132, after record 4"
    ]
    path.write_bytes(whole[132:])
    assert [frame.error for frame in read_frames(tmp_path) if frame.error] == [
        "000000000004.frames: begins with record 5"
    ]


async def test_a_learner_keeps_every_record_however_often_it_dies(tmp_path: Path) -> None:
    world = kit.World(tmp_path / "run")
    for die_at in (3, 9, 12):
        with pytest.raises(kit.Killed):
            await world.learn(die_at=die_at)
    await world.learn()
    kept = [frame.record() for frame in read_frames(tmp_path / "run" / archive.FOLDER)]
    assert kept == world.log[: len(kept)]
    assert len(kept) == max(r.seq for r in kept) >= 12
    assert (kept[0].message, kept[0].ticket) == (None, 1)
