"""The files of the ledger's lines: the same ones after any number of deaths, and a start that reads
only the newest.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import run_folder_kit as kit

from broker.errors import UserError
from learner.checkpoints import checkpoint
from learner.credit import ledger_segments, recovery
from learner.credit.ledger import Ledger
from learner.credit.ledger_file import LedgerLine, encode_lines

SUMMARY = encode_lines([LedgerLine(state="summary", reasons={}, rules=kit.rules().plain())])
# One boundary to a file, a few to a file, all in one.
SIZES = pytest.mark.parametrize("segment_bytes", [1, 2000, ledger_segments.MAX_BYTES])


def resumed(world: kit.World) -> Ledger:
    found = checkpoint.newest_checkpoint(world.folder / "checkpoints")
    assert found is not None
    return Ledger.load(found.ledger)


async def test_files_by_hand(tmp_path: Path) -> None:
    world = kit.World(tmp_path, segment_bytes=1)
    await world.learn()
    lines = kit.ledger_lines(tmp_path)
    assert list(kit.ledger_files(tmp_path)) == [
        f"step-00000{step}.jsonl" for step in (0, 1, 2, 3, 4)
    ]
    summaries = [line for line in lines if line.state == "summary"]
    boundaries = [line for line in lines if line.state == "boundary"]
    assert summaries[0] == LedgerLine(state="summary", reasons={}, rules=world.rules.plain())
    assert [(line.step, line.seq, line.counts) for line in summaries[1:]] == [
        (line.step, line.seq, line.counts) for line in boundaries[1:]
    ]
    assert [line.rules for line in summaries[1:]] == [world.rules.plain()] * 4
    assert [line.reasons for line in summaries[1:]] == [{"malformed": 1, "env_error": 1}] * 4
    # each group is trained in the step in which it arrives
    assert [line.held for line in summaries] == [()] * 5


async def test_a_summary_holds_the_groups_that_wait(tmp_path: Path) -> None:
    world = kit.World(tmp_path, kit.out_of_order, segment_bytes=1, on_late="wait")
    with pytest.raises(kit.Killed):
        await world.learn(die_at=7)
    summaries = [line for line in kit.ledger_lines(tmp_path) if line.state == "summary"]
    assert [
        [(held.state, held.ticket, held.seq, held.oldest) for held in line.held]
        for line in summaries
    ] == [
        [],
        [],
        [("arrived", 5, 3, 1), ("arrived", 6, 4, 1)],
        [],
    ]
    # from the checkpoint of step 2: only the summary knows what came with 5 and 6
    await world.learn()
    trained = [
        (line.ticket, line.seq, line.step)
        for line in kit.ledger_lines(tmp_path)
        if line.state == "trained"
    ]
    assert trained == [
        (1, 1, 1),
        (2, 2, 1),
        (3, 5, 2),
        (4, 6, 2),
        (5, 3, 3),
        (6, 4, 3),
        (7, 7, 4),
        (8, 8, 4),
    ]


@SIZES
async def test_the_same_bytes_however_often_it_dies(tmp_path: Path, segment_bytes: int) -> None:
    whole = kit.World(tmp_path / "whole", segment_bytes=segment_bytes)
    await whole.learn()
    expected = kit.ledger_files(tmp_path / "whole")
    assert len(expected) == {1: 5, 2000: 3}.get(segment_bytes, 1)
    assert len(whole.log) > 12
    world = kit.World(tmp_path / "killed", segment_bytes=segment_bytes)
    for die_at in range(1, len(whole.log) + 1):
        try:
            await world.learn(die_at=die_at)
        except kit.Killed:
            newest = (
                tmp_path
                / "killed"
                / ledger_segments.FOLDER
                / list(kit.ledger_files(tmp_path / "killed"))[-1]
            )
            with newest.open("ab") as file:
                file.write(b'{"state":"issued","tick')  # half a line
    await world.learn()
    assert kit.ledger_files(tmp_path / "killed") == expected
    assert [record.data for record in world.log] == [record.data for record in whole.log]


async def test_killed_before_a_file_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The boundary is written, and the checkpoint; the next life begins the file that this one did
    not.
    """
    await kit.World(tmp_path / "whole", segment_bytes=1).learn()
    world = kit.World(tmp_path / "run", segment_bytes=ledger_segments.MAX_BYTES)
    with pytest.raises(kit.Killed):
        await world.learn(die_at=10)
    world.segment_bytes = 1
    await world.learn()
    expected, found = kit.ledger_files(tmp_path / "whole"), kit.ledger_files(tmp_path / "run")
    assert list(found) == [
        "step-000000.jsonl",
        "step-000002.jsonl",
        "step-000003.jsonl",
        "step-000004.jsonl",
    ]
    assert {name: found[name] for name in list(found)[1:]} == {
        name: expected[name] for name in list(found)[1:]
    }


@SIZES
async def test_an_earlier_incarnation_writes_into_the_void(
    tmp_path: Path, segment_bytes: int
) -> None:
    world = kit.World(tmp_path, segment_bytes=segment_bytes)
    with pytest.raises(kit.Killed):
        await world.learn(die_at=10)
    zombie, _ = ledger_segments.resume_file(tmp_path / ledger_segments.FOLDER, resumed(world))
    await world.learn()
    before = kit.ledger_files(tmp_path)
    zombie.append(b"garbage\n")
    for step in (3, 9):  # a file that the new incarnation has, and one that it has not
        zombie.leave(step, LedgerLine(state="summary", step=step))
        zombie.append(b"garbage\n")
    zombie.close()
    assert kit.ledger_files(tmp_path) == before
    assert sorted(os.listdir(tmp_path / ledger_segments.FOLDER)) == sorted(before)


async def test_a_start_reads_only_the_newest_file(tmp_path: Path) -> None:
    await kit.World(tmp_path / "whole", segment_bytes=1).learn()
    world = kit.World(tmp_path / "run", segment_bytes=1)
    with pytest.raises(kit.Killed):
        await world.learn(die_at=11)
    first, second, *_ = (
        path for _, path in ledger_segments.segment_files(tmp_path / "run" / ledger_segments.FOLDER)
    )
    first.write_bytes(b"gibberish")
    second.write_bytes(b"")
    known = recovery.known_progress(tmp_path / "run", resumed(world))
    assert (known.issued, known.consumed) == (11, 10)
    await world.learn()
    expected = kit.ledger_files(tmp_path / "whole")
    found = kit.ledger_files(tmp_path / "run")
    assert (found.pop(first.name), found.pop(second.name)) == (b"gibberish", b"")
    assert found == {name: expected[name] for name in found}
    assert list(found) == ["step-000002.jsonl", "step-000003.jsonl", "step-000004.jsonl"]


async def test_an_older_checkpoint_deletes_later_files(tmp_path: Path) -> None:
    world = kit.World(tmp_path, segment_bytes=1)
    await world.learn()
    expected = kit.ledger_files(tmp_path)
    found = checkpoint.read_checkpoint(tmp_path / "checkpoints" / "step-000002")
    file, lines = ledger_segments.resume_file(
        tmp_path / ledger_segments.FOLDER, Ledger.load(found.ledger), 1
    )
    assert file.first == 2
    assert [line.state for line in lines] == ["summary"]
    file.close()
    assert list(kit.ledger_files(tmp_path)) == [
        "step-000000.jsonl",
        "step-000001.jsonl",
        "step-000002.jsonl",
    ]
    known = recovery.known_progress(tmp_path, Ledger(world.rules))
    assert (known.issued, known.consumed) == (lines[0].counts["issued"], lines[0].seq) == (11, 9)
    remains = kit.ledger_files(tmp_path)
    assert {name: expected[name] for name in list(remains)[:2]} == {
        name: remains[name] for name in list(remains)[:2]
    }


def put(folder: Path, **files: bytes) -> Path:
    folder.mkdir()
    for name, data in files.items():
        (folder / f"{name.replace('_', '-')}.jsonl").write_bytes(data)
    return folder


def test_a_line_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    bad = (
        SUMMARY
        + b'{"state":"issued","ticket":1}\n{"state":"eaten","ticket":2}\n{"state":"issued","ticket":3}\n{"sta'
    )
    folder = put(tmp_path / "a", step_000000=bad)
    lines = ledger_segments.LedgerLines(folder)
    assert [line.ticket for line in lines] == [0, 1]
    assert lines.problem.startswith("step-000000.jsonl:3: Invalid enum value 'eaten'")
    assert ledger_segments.read_newest(folder) == (list(lines), lines.problem)
    assert list(ledger_segments.LedgerLines(tmp_path / "none")) == []
    assert ledger_segments.read_newest(tmp_path / "none") == ([], "")


@pytest.mark.parametrize(
    ("first", "second", "problem"),
    [
        (
            SUMMARY + b'{"st',
            b'{"state":"summary","step":3}\n',
            "step-000000.jsonl: ends in half a line",
        ),
        (
            SUMMARY,
            b'{"state":"issued","ticket":1}\n',
            "step-000003.jsonl: does not begin with the summary of step 3",
        ),
        (
            SUMMARY,
            b'{"state":"summary","step":4}\n',
            "step-000003.jsonl: does not begin with the summary of step 3",
        ),
        (SUMMARY, b"", "step-000003.jsonl: does not begin with the summary of step 3"),
        (SUMMARY, b'{"state":"summary","step":3}\n{"st', ""),
        (
            SUMMARY,
            b'{"state":"summary","step":3,"held":' + b'[{"held":' * 5000,
            "step-000003.jsonl: does not begin with the summary",
        ),
    ],
)
def test_files_that_do_not_fit_together(
    tmp_path: Path, first: bytes, second: bytes, problem: str
) -> None:
    lines = ledger_segments.LedgerLines(put(tmp_path / "a", step_000000=first, step_000003=second))
    list(lines)
    assert lines.problem.startswith(problem)
    assert bool(lines.problem) == bool(problem)


def test_deeply_nested_lines_are_refused(tmp_path: Path) -> None:
    deep = b'{"state":"summary","held":[' * 5000 + b"]}" * 5000 + b"\n"
    lines = ledger_segments.LedgerLines(put(tmp_path / "a", step_000000=deep))
    assert list(lines) == []
    assert lines.problem == "step-000000.jsonl:1: nested too deeply"


def test_a_run_of_an_earlier_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ledger.jsonl").write_bytes(b'{"state":"issued","ticket":1}\n')
    with pytest.raises(
        UserError,
        match=r"ledger\.jsonl: written by an earlier version of rlearner; read or resume the run with that",
    ):
        recovery.known_progress(tmp_path, Ledger(kit.rules()))


def test_leaving_a_file_can_be_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, _ = ledger_segments.resume_file(tmp_path / ledger_segments.FOLDER, Ledger(kit.rules()))
    real = os.pwrite

    def pwrite(descriptor: int, data: bytes, offset: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(OSError, match="No space left"):
        file.leave(2, LedgerLine(state="summary", step=2))
    monkeypatch.setattr(os, "pwrite", real)
    assert (
        list(kit.ledger_files(tmp_path))
        == os.listdir(tmp_path / ledger_segments.FOLDER)
        == ["step-000000.jsonl"]
    )
    file.append(b'{"state":"issued","ticket":1}\n')  # still the first file
    file.leave(2, LedgerLine(state="summary", step=2))
    file.append(b'{"state":"issued","ticket":2}\n')
    file.close()
    assert [(line.state, line.step, line.ticket) for line in kit.ledger_lines(tmp_path)] == [
        *[("summary", 0, 0), ("issued", 0, 1), ("summary", 2, 0), ("issued", 0, 2)]
    ]
