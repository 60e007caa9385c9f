"""The ledger file: lines by hand, the same bytes after any number of deaths, nothing of a crash
left in it.
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import msgspec
import pytest
import run_folder_kit as kit

from broker.errors import UserError
from broker.runtime.process import Stop
from learner import disk_retry
from learner.checkpoints import checkpoint
from learner.config import SamplesSection
from learner.credit import archive, ledger_file, ledger_segments, record_intake
from learner.credit.ledger import IssueTicket, Ledger
from learner.credit.ledger_file import LedgerLine, LedgerLineBuilder
from learner.credit.records import LedgerRecorder
from rlearner.ops.status import on_disk


def short(line: LedgerLine) -> tuple[object, ...]:
    if line.state == "boundary":
        return (line.state, line.step, line.seq, line.counts["issued"], line.counts["open"])
    return (line.state, line.ticket, line.seq, line.step, line.oldest, line.newest, line.reason)


async def test_lines_by_hand(tmp_path: Path) -> None:
    world = kit.World(tmp_path / "a", steps=2)
    await world.learn()
    summary, *lines = kit.ledger_lines(tmp_path / "a")
    assert summary == LedgerLine(state="summary", reasons={}, rules=world.rules.plain())
    assert [short(line) for line in lines] == [
        *[("issued", number, 0, 0, -1, -1, "") for number in (1, 2, 3, 4)],
        ("boundary", 0, 0, 4, 4),
        ("dead", 1, 1, 0, -1, -1, "malformed"),
        ("issued", 5, 0, 0, -1, -1, ""),
        ("duplicate", 1, 2, 0, -1, -1, ""),
        ("arrived", 2, 3, 0, 0, 0, ""),
        ("duplicate", 2, 4, 0, -1, -1, ""),
        ("dropped", 3, 5, 0, -1, -1, "late"),
        ("issued", 6, 0, 0, -1, -1, ""),
        ("dead", 4, 6, 0, -1, -1, "env_error"),
        ("issued", 7, 0, 0, -1, -1, ""),
        ("arrived", 5, 7, 0, 0, 0, ""),
        ("trained", 2, 3, 1, 0, 0, ""),
        ("trained", 5, 7, 1, 0, 0, ""),
        ("boundary", 1, 7, 7, 2),
        ("arrived", 6, 8, 0, 0, 0, ""),
        ("arrived", 7, 9, 0, 0, 0, ""),
        ("trained", 6, 8, 2, 0, 0, ""),
        ("trained", 7, 9, 2, 0, 0, ""),
        ("boundary", 2, 9, 7, 0),
    ]
    assert (lines[0].domain, lines[1].task_index, lines[0].min_version) == ("lake", 1, 0)
    assert lines[8].digest == ledger_file.digest_record(world.log[2].data) != ""


async def test_a_tally_counts_on_from_the_last_boundary(tmp_path: Path) -> None:
    await kit.World(tmp_path / "a", steps=2).learn()
    _, *lines = kit.ledger_lines(tmp_path / "a")
    bare = [msgspec.structs.replace(line, counts={}) for line in lines]
    for number, line in enumerate(lines, start=1):
        # what was counted from the lines alone is what the ledger says
        if line.state == "boundary":
            assert (
                ledger_file.final_counts(bare[:number])[0]
                == ledger_file.final_counts(lines[:number])[0]
                == line.counts
            )
    # behind the first boundary: seven issued, three ended
    counts, dead = ledger_file.final_counts(lines[:14])
    assert [
        counts[name] for name in ("issued", "trained", "dropped", "dead", "open", "duplicate")
    ] == [
        7,
        0,
        1,
        2,
        4,
        2,
    ]
    assert dead == {"malformed": 1, "env_error": 1}
    assert ledger_file.final_counts([]) == ({}, {})


async def test_more_steps_later(tmp_path: Path) -> None:
    world = kit.World(tmp_path / "run", steps=2)
    await world.learn()
    world.rules = kit.rules(steps=4)
    await world.learn()
    lines = kit.ledger_lines(tmp_path / "run")
    ends = [(line.step, line.counts["issued"]) for line in lines if line.state == "boundary"]
    assert ends == [(0, 4), (1, 7), (2, 7), (3, 12), (4, 12)]


@pytest.mark.parametrize("damage", ["deleted", "one line"])
async def test_a_run_older_than_its_ledger_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    """It goes on, and says what is not known any more, once and in its status."""
    world = kit.World(tmp_path / "run", kit.group_only, steps=4)
    with pytest.raises(kit.Killed):
        await world.learn(die_at=6)  # checkpoint of step 2
    folder = tmp_path / "run" / ledger_segments.FOLDER
    if damage == "deleted":
        shutil.rmtree(folder)
        why = "files are missing"
    else:
        file = folder / "step-000000.jsonl"
        rows = file.read_bytes().split(b"\n")
        file.write_bytes(b"\n".join([*rows[:2], b"{garbage", *rows[3:]]))
        why = "step-000000.jsonl:3: "
    await world.learn()
    assert caplog.text.count(f"{folder}: {why}") == 1
    assert "the tickets before step 2 are no longer recorded and cannot be audited" in caplog.text
    status = on_disk(tmp_path / "run", steps=4)
    assert status["ledger_file"] == "nothing is recorded of tickets before step 2"
    lines = kit.ledger_lines(tmp_path / "run")
    assert lines[0].state == "unrecorded"
    assert (lines[0].step, lines[0].seq, lines[0].counts["issued"]) == (2, 4, 8)
    assert [line.ticket for line in lines if line.state == "trained"] == [5, 6, 7, 8]


@pytest.mark.parametrize("segment_bytes", [1, ledger_segments.MAX_BYTES])
async def test_a_full_disk_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, segment_bytes: int
) -> None:
    monkeypatch.setattr(disk_retry, "FIRST_WAIT_S", 0.001)
    real, attempts = os.pwrite, 0
    start = ledger_file.encode_lines([LedgerLineBuilder().summary(kit.rules())])

    def pwrite(file: int, data: bytes, offset: int) -> int:
        nonlocal attempts
        # what the kit writes without waiting for space
        if b"staleness/max" in data or data == start:
            return real(file, data, offset)
        attempts += 1
        if attempts % 3 == 1:
            return real(file, data[: len(data) // 2 or 1], offset)  # half of it, and then no space
        if attempts % 3 == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, data, offset)

    whole = kit.World(tmp_path / "whole", segment_bytes=segment_bytes)
    await whole.learn()
    world = kit.World(tmp_path / "run", segment_bytes=segment_bytes)
    monkeypatch.setattr(os, "pwrite", pwrite)
    await world.learn()
    assert kit.ledger_files(tmp_path / "run") == kit.ledger_files(tmp_path / "whole")
    # no remains
    assert sorted(os.listdir(tmp_path / "run" / ledger_segments.FOLDER)) == sorted(
        kit.ledger_files(tmp_path / "run")
    )
    for path in (tmp_path / "whole" / "samples").iterdir():
        assert (tmp_path / "run" / "samples" / path.name).read_bytes() == path.read_bytes()


async def test_an_earlier_incarnation_no_longer_archives(tmp_path: Path) -> None:
    """It resumed at the same record as the learner that took over, so its first archive file has
    the name of that learner's.
    """
    world = kit.World(tmp_path)
    with pytest.raises(kit.Killed):
        await world.learn(die_at=10)
    found = checkpoint.newest_checkpoint(tmp_path / "checkpoints")
    assert found is not None
    ledger = Ledger.load(found.ledger)
    zombie = LedgerRecorder(tmp_path, ledger, SamplesSection(keep=True), Stop())
    await world.learn()
    before = {
        path.name: path.read_bytes() for _, path in archive.archive_files(tmp_path / archive.FOLDER)
    }
    entry = world.log[ledger.state.position]
    await zombie.began(ledger.open_credit())
    await zombie.consumed(
        entry,
        read := record_intake.read_record(entry, ledger, 100),
        ledger.apply(read.record, entry.seq),
    )
    await zombie.sync()
    zombie.close()
    assert f"{entry.seq:012d}.frames" in before
    assert {
        path.name: path.read_bytes() for _, path in archive.archive_files(tmp_path / archive.FOLDER)
    } == before


async def test_a_stop_ends_the_wait_for_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pwrite(file: int, data: bytes, offset: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    ledger, stop = Ledger(kit.rules()), Stop()
    kept = LedgerRecorder(tmp_path, ledger, SamplesSection(), stop)
    monkeypatch.setattr(os, "pwrite", pwrite)
    stop.request("test")
    opened = ledger.open_credit()
    assert all(isinstance(action, IssueTicket) for action in opened)
    with pytest.raises(
        UserError, match=r"No space left on device \(\d+ MiB free\); asked to stop$"
    ):
        await kept.began(opened)
    kept.close()
