"""The bounded archive: it holds the newest groups and few more, whatever kills it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.errors import ConfigError
from broker.jetstream.bus import LogRecord
from broker.settings.sections import parse
from learner.config import SamplesSection
from learner.credit import archive, archive_trim
from learner.credit.archive import archive_files, read_frames
from learner.credit.archive_trim import (
    ArchiveTrim,
    BoundedArchive,
    max_groups,
    missing_reason,
    read_trim,
)
from learner.credit.ledger_file import digest_record
from learner.credit.token_files import TokenFiles, file_of


class PowerLoss(BaseException):
    """The process was killed here."""


def record(seq: int, ticket: int | None = None) -> LogRecord:
    return LogRecord(seq, None, "", seq if ticket is None else ticket, b"x" * 10)


def append_all(bounded: BoundedArchive, *records: LogRecord) -> None:
    for entry in records:
        bounded.append(entry, digest_record(entry.data))


def archived(folder: Path) -> list[int]:
    frames = list(read_frames(folder))
    assert [frame.error for frame in frames] == [""] * len(frames)
    return [frame.seq for frame in frames]


def test_oldest_files_are_removed(tmp_path: Path) -> None:
    bounded = BoundedArchive(tmp_path, 0, 10**6, 16)
    append_all(bounded, *map(record, range(1, 20)))
    # A file holds an eighth of 16 groups; at 19 there are still 16 in the files before it.
    assert archived(tmp_path) == list(range(3, 20))
    assert [first for first, _ in archive_files(tmp_path)] == list(range(3, 20, 2))
    assert read_trim(tmp_path) == ArchiveTrim(before=3, keep=16)
    append_all(bounded, record(20))
    assert archived(tmp_path) == list(range(3, 21))
    append_all(bounded, record(21))
    bounded.close()
    assert archived(tmp_path) == list(range(5, 22))
    assert missing_reason(tmp_path, 4) == (
        "no longer there: the archive keeps the newest 16 groups (samples.keep)"
    )
    assert missing_reason(tmp_path, 5) == "not in the archive (samples.keep)"
    assert max_groups(16) == 19
    assert max_groups(200) == 249


def test_duplicates_and_other_records_are_no_groups(tmp_path: Path) -> None:
    bounded = BoundedArchive(tmp_path, 0, 10**6, 2)
    append_all(bounded, record(1), record(2), record(3, 2), record(4, 0), record(5, 0))
    assert archived(tmp_path) == [1, 2, 3, 4, 5]
    append_all(bounded, record(6, 3), record(7, 4))
    bounded.close()
    assert archived(tmp_path) == [3, 4, 5, 6, 7]


def test_a_lower_bound_removes_at_the_start(tmp_path: Path) -> None:
    unbounded = archive.SampleArchive(tmp_path, 0, 100)
    for seq in range(1, 41):
        unbounded.append(record(seq), digest_record(record(seq).data))
    unbounded.close()
    archive.mark_paused(tmp_path, 40)
    assert archive.paused_ranges(tmp_path)[0][0] == 41
    append_all(unbounded := archive.SampleArchive(tmp_path, 50, 100), *map(record, range(51, 61)))
    unbounded.close()
    BoundedArchive(tmp_path, 60, 100, 4).close()
    assert archived(tmp_path) == [57, 58, 59, 60]
    assert archive.paused_ranges(tmp_path) == []
    assert read_trim(tmp_path) == ArchiveTrim(before=57, keep=4)


def test_an_older_checkpoint_archives_again(tmp_path: Path) -> None:
    append_all(bounded := BoundedArchive(tmp_path, 0, 10**6, 8), *map(record, range(1, 31)))
    bounded.close()
    assert read_trim(tmp_path).before == 22
    append_all(bounded := BoundedArchive(tmp_path, 10, 10**6, 8), *map(record, range(11, 14)))
    bounded.close()
    assert archived(tmp_path) == [11, 12, 13]
    assert read_trim(tmp_path) == ArchiveTrim(before=11, keep=8)


def test_a_damaged_note_removes_nothing(tmp_path: Path) -> None:
    append_all(bounded := BoundedArchive(tmp_path, 0, 10**6, 1), *map(record, range(1, 5)))
    bounded.close()
    (tmp_path / archive_trim.FILE).write_bytes(b"{")
    assert read_trim(tmp_path) == ArchiveTrim()
    assert archived(tmp_path) == [3, 4]


def test_files_removed_while_they_are_read(tmp_path: Path) -> None:
    append_all(bounded := BoundedArchive(tmp_path, 0, 10**6, 16), *map(record, range(1, 10)))
    frames = read_frames(tmp_path)
    assert next(frames).seq == 1
    append_all(bounded, *map(record, range(10, 22)))
    bounded.close()
    seqs = [frame.seq for frame in frames]
    assert seqs == [2, 5, 6, 7, 8, 9, 10]


ACTIONS = st.lists(
    st.tuples(
        st.integers(0, 25),  # records appended
        st.integers(0, 12),  # calls that change the folder before the process is killed, 0: none
        st.integers(0, 12),  # records behind the checkpoint from which the next one resumes
    ),
    max_size=6,
)


@settings(max_examples=60, deadline=None)
@given(keep=st.integers(1, 20), lives=ACTIONS, max_file_bytes=st.sampled_from([1, 130, 10**6]))
def test_any_sequence_of_lives(
    tmp_path_factory: pytest.TempPathFactory,
    keep: int,
    lives: list[tuple[int, int, int]],
    max_file_bytes: int,
) -> None:
    """Each life may be killed at any removal or write of the note, and reads some records again."""
    folder = tmp_path_factory.mktemp("archive")
    position = 0
    for num_records, num_calls, num_repeated in lives:
        with pytest.MonkeyPatch.context() as patch:
            kill_after(patch, num_calls)
            end = position
            bounded = None
            try:
                bounded = BoundedArchive(folder, position, max_file_bytes, keep)
                for end in range(position + 1, position + 1 + num_records):
                    append_all(bounded, record(end))
            except PowerLoss:
                end = max(position, end - 1)
            finally:
                if bounded is not None:
                    bounded.close()
        kept = archived(folder)
        before = read_trim(folder).before
        # No gap, and only records before the note are missing.
        assert kept == list(range(kept[0], kept[-1] + 1) if kept else [])
        assert [seq for seq in range(max(before, 1), end + 1) if seq not in kept] == []
        position = max(0, end - num_repeated)
    BoundedArchive(folder, position, max_file_bytes, keep).close()
    append_all(
        bounded := BoundedArchive(folder, position, max_file_bytes, keep),
        *map(record, range(position + 1, position + 2 * keep + 1)),
    )
    bounded.close()
    kept = archived(folder)
    assert kept[-1] == position + 2 * keep
    assert keep <= len(kept) <= max_groups(keep)
    assert kept == list(range(kept[0], kept[-1] + 1))
    assert kept[0] in (1, read_trim(folder).before)


def kill_after(patch: pytest.MonkeyPatch, num_calls: int) -> None:
    """Raise ``PowerLoss`` before one of the calls that remove or replace files; 0: never."""
    remaining = iter(range(num_calls - 1))

    def wrap(function):
        def call(*arguments, **options):
            if num_calls and next(remaining, None) is None:
                raise PowerLoss
            return function(*arguments, **options)

        return call

    patch.setattr(Path, "unlink", wrap(Path.unlink))
    patch.setattr(os, "replace", wrap(os.replace))


def test_token_files_are_bounded(tmp_path: Path) -> None:
    tokens = TokenFiles(tmp_path, 0, keep_steps=2)
    for step in (1, 2, 3):
        tokens.write(step, {})
    tokens.flush()
    tokens.close()
    assert [file_of(tmp_path, step).exists() for step in (1, 2, 3)] == [False, True, True]
    TokenFiles(tmp_path, 3, keep_steps=1).close()
    assert [file_of(tmp_path, step).exists() for step in (2, 3)] == [False, True]


@pytest.mark.parametrize("value", [0, -1, 1.5, "all", "200"])
def test_other_values_are_refused(value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        parse("samples", {"keep": value}, SamplesSection)
    expected = "expected true, false or a number of groups, at least 1"
    assert str(caught.value) == str(ConfigError("samples.keep", value, expected))


def test_one_is_a_number() -> None:
    assert SamplesSection(keep=1).keep == 1
    assert SamplesSection(keep=1).keep is not True
    assert SamplesSection(keep=True).keep is True
