"""The audit: silent about a run that is right, and loud about everything that was removed, doubled
or changed on purpose.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import run_folder_kit as kit

from broker.contract import wire
from broker.errors import DataError, UserError
from learner.checkpoints import checkpoint
from learner.credit import archive, archive_trim, ledger_segments
from learner.credit.archive import archive_files
from learner.credit.ledger import GroupArrival, Ledger
from learner.credit.ledger_file import LedgerLine, LedgerLineBuilder
from rlearner.audit import tap_records
from rlearner.audit.ledger_audit import LedgerAudit
from rlearner.audit.report import AuditReport, format_ranges
from rlearner.audit.run import read_run_records, reconcile_run
from rlearner.audit.sources import audited_record, check_metrics

CLEAN = {
    "tickets": 12,
    "trained": 8,
    "filtered": 0,
    "dropped": 2,
    "dead": 2,
    "open": 0,
    "lost": 0,
    "trained_twice": 0,
}
CLEAN |= {"not_archived": 0, "ok": True}


def consumed(world: kit.World) -> int:
    """Sequence of the last record that the learner has consumed."""
    return max(line.seq for line in kit.ledger_lines(world.folder))


async def a_run(folder: Path, **more: Any) -> kit.World:
    """A finished run of four steps; its records are archived."""
    world = kit.World(folder / "run", **more)
    await world.learn()
    return world


def check(world: kit.World, *, log: bool = False, tap: bool = False) -> AuditReport:
    broker = (1, [audited_record(record) for record in world.log]) if log else None
    return reconcile_run(read_run_records(world.folder), log=broker, tap=world.tap if tap else None)


def figures(report: AuditReport) -> dict[str, Any]:
    return {
        name: value for name, value in report.to_json().items() if name not in ("problems", "notes")
    }


def rows(path: Path) -> list[str]:
    return path.read_text().splitlines()


def put(path: Path, lines: list[str]) -> None:
    path.write_text("".join(line + "\n" for line in lines))


def ledger_file(world: kit.World) -> Path:
    """The only one of a short run."""
    ((_, path),) = ledger_segments.segment_files(world.folder / ledger_segments.FOLDER)
    return path


# One boundary to a file, a few to a file, all in one.
SIZES = pytest.mark.parametrize("segment_bytes", [1, 2000, ledger_segments.MAX_BYTES])


@SIZES
async def test_a_run_that_is_right(tmp_path: Path, segment_bytes: int) -> None:
    world = await a_run(tmp_path, segment_bytes=segment_bytes)
    report = check(world, log=True, tap=True)
    assert report.problems == []
    assert figures(report) == CLEAN
    assert "metrics.jsonl: 4 steps compared" in report.notes
    assert "checkpoints: 2 compared" in report.notes
    assert sum("records compared" in note for note in report.notes) == 2


async def test_each_checkpoint_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = await a_run(tmp_path)
    paths: list[Path] = []
    read = checkpoint.read_checkpoint
    monkeypatch.setattr(
        checkpoint, "read_checkpoint", lambda path: paths.append(path) or read(path)
    )
    assert sorted(read_run_records(world.folder).checkpoints) == [2, 4]
    assert paths == checkpoint.list_checkpoints(world.folder / "checkpoints")


async def test_a_run_that_is_half_done(tmp_path: Path) -> None:
    world = kit.World(tmp_path / "run")
    with pytest.raises(kit.Killed):
        await world.learn(die_at=11)
    report = check(world, log=True, tap=True)
    assert report.problems == []
    found = figures(report)
    assert found["ok"]
    assert (
        found["open"] == found["tickets"] - found["trained"] - found["dropped"] - found["dead"] > 0
    )
    with pytest.raises(kit.Killed):
        await world.learn(die_at=12)
    assert check(world, log=True, tap=True).ok


async def test_a_completed_run_that_goes_further_is_right(tmp_path: Path) -> None:
    """More steps open the credit of the last one again, behind its line in metrics.jsonl."""
    world = await a_run(tmp_path)
    for steps in (5, 7):
        world.rules = replace(world.rules, steps=steps)
        await world.learn()
        assert check(world, log=True, tap=True).problems == []
    lines = rows(world.folder / "metrics.jsonl")
    # neither before nor after the credit was opened again
    wrong = json.loads(lines[3]) | {"ticket/issued": 13, "ticket/open": 1}
    put(world.folder / "metrics.jsonl", [*lines[:3], json.dumps(wrong), *lines[4:]])
    assert check(world).problems == [
        "step 4: metrics.jsonl and the ledger file disagree on issued, open"
    ]


@SIZES
@pytest.mark.parametrize("again", [False, True])
async def test_records_that_were_not_archived_are_not_lost(
    tmp_path: Path, segment_bytes: int, again: bool
) -> None:
    """The archive is on, then off, then perhaps on again; groups per step and the configuration on
    disk change with it.
    """
    world = await a_run(tmp_path, segment_bytes=segment_bytes)
    archived = consumed(world)
    world.keep, world.rules = False, replace(world.rules, steps=6, groups_per_step=4)
    await world.learn()
    without = consumed(world) - archived
    if again:
        world.keep, world.rules = True, replace(world.rules, steps=9, groups_per_step=3)
        with pytest.raises(kit.Killed):
            await world.learn(die_at=world.log[-1].seq + 3)
        await world.learn()
    world.config["train"] = {"steps": 1}
    (world.folder / "config.yaml").write_text(json.dumps(world.config))
    report = check(world)
    assert report.problems == []
    found = figures(report)
    assert (found["lost"], found["open"], found["ok"], found["not_archived"]) == (
        0,
        0,
        True,
        without,
    )
    assert any(
        note.startswith(f"not archived: {without} records ({archived + 1}-")
        for note in report.notes
    ), report.notes


async def test_an_archive_that_is_off_keeps_what_an_earlier_life_wrote(tmp_path: Path) -> None:
    """Killed behind its checkpoint, then off: records that were archived stay; a life that archives
    again takes the place of the rest.
    """
    world = kit.World(tmp_path / "run")
    with pytest.raises(kit.Killed):
        await world.learn(die_at=11)
    world.keep = False
    with pytest.raises(kit.Killed):
        await world.learn(die_at=14)
    archived = archive.paused_ranges(world.folder / "samples")
    assert archived == [(11, sys.maxsize - 1)]
    assert [frame.seq for frame in archive.read_frames(world.folder / "samples")] == list(
        range(1, 11)
    )
    assert figures(check(world))["not_archived"] == 3
    world.keep = True
    await world.learn()
    report = check(world)
    assert (report.problems, report.not_archived) == ([], 0)


async def test_a_damaged_archive_loses_no_ticket(tmp_path: Path) -> None:
    """Its gap is a problem, but the tickets of the missing records have ended."""
    world = await a_run(tmp_path)
    # the first file but one that holds several records
    files = [path for _, path in archive_files(world.folder / "samples")[1:]]
    path = next(path for path in files if path.read_bytes().count(b"RLS1") > 1)
    whole = path.read_bytes()
    path.write_bytes(whole[: whole.index(b"RLS1", 4)])
    report = check(world)
    assert report.problems[0].startswith("the archive: records ")
    assert figures(report)["lost"] == 0


async def test_a_ticket_whose_record_is_gone_before_its_step_is_lost(tmp_path: Path) -> None:
    world = kit.World(tmp_path / "run", kit.group_only, keep=False)
    with pytest.raises(kit.Killed):
        await world.learn(die_at=4)
    broker = [audited_record(record) for record in world.log if record.seq != 3]
    report = reconcile_run(read_run_records(world.folder), log=(1, broker))
    assert report.problems == ["the broker's log: records 3 are missing"]
    assert report.lost == {3}


@SIZES
async def test_each_line_removed_or_doubled_fails(tmp_path: Path, segment_bytes: int) -> None:
    world = await a_run(tmp_path, segment_bytes=segment_bytes)
    for _, path in ledger_segments.segment_files(world.folder / ledger_segments.FOLDER):
        lines = rows(path)
        for i, line in enumerate(lines):
            put(path, lines[:i] + lines[i + 1 :])
            removed = check(world)
            assert not removed.ok, line
            state = json.loads(line)
            put(path, [*lines[:i], line, *lines[i:]])
            doubled = check(world)
            if state["state"] in ("boundary", "summary"):
                assert doubled.ok  # it says the same again
                continue
            assert not doubled.ok, line
            if state["state"] == "trained":
                assert figures(doubled)["trained_twice"] == 1
                assert figures(removed)["lost"] >= 1
            if state["state"] in ("dead", "dropped", "issued"):
                assert figures(removed)["lost"] >= 1
        put(path, lines)
    for first, path in reversed(
        ledger_segments.segment_files(world.folder / ledger_segments.FOLDER)
    ):
        lines = rows(path)
        for i in range(1, len(lines)):  # its end is gone: metrics and checkpoints know more
            put(path, lines[:i])
            # a last file of a summary alone says as much as the boundary before it
            if first < 4 or i > 1:
                assert not check(world).ok, lines[i]
        put(path, lines)
    assert check(world).ok


async def test_each_file_removed_fails(tmp_path: Path) -> None:
    world = await a_run(tmp_path, segment_bytes=1)
    for first, path in ledger_segments.segment_files(world.folder / ledger_segments.FOLDER):
        whole = path.read_bytes()
        path.unlink()
        assert check(world).ok == (first == 4), path  # the last one holds nothing but a summary yet
        path.write_bytes(whole)
    assert check(world).ok


@pytest.mark.parametrize(
    ("edit", "what"),
    [
        ({"seq": 1}, "the start"),
        ({"counts": {"issued": 12}}, "the start"),
        ({"held": [{"state": "arrived", "ticket": 5, "seq": 7}]}, "the waiting groups"),
        ({"held": []}, "the waiting groups"),
        ({"reasons": {"env_error": 7}}, "why tickets died"),
        ({"rules": {"seed": 1}}, "the rules"),
    ],
)
async def test_a_summary_that_disagrees_fails(
    tmp_path: Path, edit: dict[str, Any], what: str
) -> None:
    """Of the boundary at which 5 and 6 have arrived, and wait for the step after 3 and 4."""
    world = await a_run(tmp_path, answer=kit.out_of_order, on_late="wait", segment_bytes=1)
    assert check(world).ok
    path = world.folder / ledger_segments.FOLDER / "step-000002.jsonl"
    first, *rest = rows(path)
    put(path, [json.dumps(json.loads(first) | edit), *rest])
    assert check(world).problems == [
        f"the summary of step 2 and the lines before it disagree on {what}"
    ]


async def test_each_archived_record_removed_or_doubled_fails(tmp_path: Path) -> None:
    world = await a_run(tmp_path)
    found = archive_files(world.folder / "samples")
    assert len(found) > 3
    for i, (first, path) in enumerate(found):
        whole = path.read_bytes()
        cuts = [index for index in range(len(whole)) if whole[index : index + 4] == b"RLS1"] + [
            len(whole)
        ]
        for start, end in itertools.pairwise(cuts):
            path.write_bytes(whole[:start] + whole[end:])
            report = check(world)
            assert not report.ok, (first, start)
            path.write_bytes(whole[:end] + whole[start:end] + whole[end:])
            assert "is there twice" in " ".join(check(world).problems), (first, start)
        path.write_bytes(whole)
        path.unlink()
        # an archive may begin late; then nobody can say what stood before
        assert check(world).ok == (i == 0), first
        path.write_bytes(whole)
    assert check(world).ok


async def test_each_record_removed_from_the_log_fails(tmp_path: Path) -> None:
    world = await a_run(tmp_path, keep=False)
    whole = [audited_record(record) for record in world.log]
    for i, record in enumerate(whole):
        report = reconcile_run(read_run_records(world.folder), log=(1, whole[:i] + whole[i + 1 :]))
        if record.seq > 15:  # after the last step nothing was consumed
            continue
        assert f"the broker's log: records {record.seq} are missing" in report.problems
    trimmed = reconcile_run(read_run_records(world.folder), log=(9, whole[8:]))
    assert trimmed.ok
    assert any("records compared (9-" in note for note in trimmed.notes)


async def test_another_record_in_the_log_fails(tmp_path: Path) -> None:
    world = await a_run(tmp_path, keep=False)
    record = world.log[2]
    assert isinstance(record.message, wire.Group)
    ticket = wire.Ticket(
        number=2,
        domain="lake",
        task_index=1,
        seed=0,
        min_version=0,
        max_staleness=1,
        group_size=2,
        min_group_size=2,
        deadline_s=1.0,
    )
    world.log[2:3] = []
    world.store(2, kit.group(ticket, 0, hub="hub-2"))
    other = world.log.pop()
    forged = [audited_record(r) for r in world.log]
    forged.insert(
        2, audited_record(other).__class__(3, 2, audited_record(other).digest, True, 0, 0)
    )
    report = reconcile_run(read_run_records(world.folder), log=(1, forged))
    assert len(report.problems) == 1
    assert report.problems[0].startswith("the broker's log: record 3 is of ticket 2 (")


async def test_each_line_of_the_tap_removed_or_doubled_fails(tmp_path: Path) -> None:
    world = await a_run(tmp_path)
    whole = list(world.tap)
    for i in range(1, len(whole) - 1):
        world.tap = whole[:i] + whole[i + 1 :]
        assert f"tap: its own lines {i + 1} are missing" in check(world, tap=True).problems
        # as if the message had never been there
        world.tap = [{**line, "n": n} for n, line in enumerate(world.tap, start=1)]
        report = check(world, tap=True)
        consumed = (
            whole[i]["event"] == "ticket" or whole[i]["digest"] in (ledger_file(world)).read_text()
        )
        assert report.ok != consumed, whole[i]
        world.tap = whole[: i + 1] + whole[i:]
        assert f"tap: its own lines {i + 1} appear twice" in check(world, tap=True).problems


async def test_what_the_tap_saw_and_the_learner_does_not_know(tmp_path: Path) -> None:
    world = await a_run(tmp_path)
    n = len(world.tap)
    world.tap.append(
        {
            "n": n + 1,
            "event": "ticket",
            "ticket": 99,
            "digest": "00",
            "domain": "lake",
            "task_index": 0,
            "min_version": 0,
        }
    )
    report = check(world, tap=True)
    assert report.lost == {99}
    assert report.problems == ["tap: tickets 99 went out, but the ledger file has not issued them"]
    world.tap[-1] = {**world.tap[1], "n": n + 1, "digest": "00", "min_version": 1}
    assert check(world, tap=True).problems == ["tap: ticket 1 went out with two different contents"]
    world.tap.pop()
    trained = next(
        line for line in world.tap if line.get("kind") == "Group" and line["ticket"] == 7
    )
    trained["oldest"] = -1
    trained["newest"] = 9
    assert "the tap has a token of version 9" in check(world, tap=True).problems[0]


async def test_a_blind_tap_proves_nothing_by_silence(tmp_path: Path) -> None:
    world = await a_run(tmp_path)
    blind = [line for line in world.tap if line.get("ticket") != 7] + [{"event": "disconnected"}]
    world.tap = [{**line, "n": n} for n, line in enumerate(blind, start=1)]
    report = check(world, tap=True)
    assert report.ok
    assert "it was interrupted (disconnected)" in report.notes[-1]


def change(path: Path, state: str, edit: Callable[[dict[str, Any]], None], which: int = -1) -> None:
    lines = [json.loads(row) for row in rows(path)]
    edit([line for line in lines if line["state"] == state][which])
    put(path, [json.dumps(line) for line in lines])


async def test_tokens_beyond_the_bound_fail(tmp_path: Path) -> None:
    world = await a_run(tmp_path, answer=kit.group_only, keep=False, steps=4)
    path = ledger_file(world)
    change(path, "trained", lambda line: line.update(oldest=1))
    report = check(world)
    assert report.problems == [
        "ticket 8, trained in step 4: the ledger file has a token of version 1, the bound is 1",
    ]
    change(path, "trained", lambda line: line.update(oldest=2, newest=4))
    assert check(world).problems == [
        "ticket 8, trained in step 4: the ledger file has a token of version 4, newer than that"
    ]
    change(path, "trained", lambda line: line.update(newest=2))
    assert check(world).ok
    # books that agree with each other, and a log that says otherwise
    forged = [audited_record(record) for record in world.log]
    last = forged[7]
    forged[7] = last.__class__(last.seq, last.ticket, last.digest, True, 0, 2)
    report = reconcile_run(read_run_records(world.folder), log=(1, forged))
    assert report.problems == [
        "ticket 8, trained in step 4: the broker's log has a token of version 0, the bound is 1"
    ]


async def test_checkpoints_and_metrics_that_disagree_fail(tmp_path: Path) -> None:
    world = await a_run(tmp_path)
    file = world.folder / "checkpoints" / "step-000002" / "learner" / "learner.json"
    whole = file.read_text()
    body = json.loads(whole)
    body["ledger"]["trained"] += 1
    file.write_text(json.dumps(body))
    assert check(world).problems == ["checkpoint 2 counts 5 tickets trained, the ledger file 4"]
    body = json.loads(whole)
    number = next(iter(body["ledger"]["live"]))
    del body["ledger"]["live"][number]
    file.write_text(json.dumps(body))
    assert check(world).problems == [
        f"checkpoint 2 has ended tickets {number} that the ledger file has open"
    ]
    body["ledger"]["position"] += 1
    file.write_text(json.dumps(body))
    assert check(world).problems == ["checkpoint 2 matches no boundary of the ledger file"]
    file.write_text(whole[:-30])
    assert "cannot be read" in check(world).problems[0]
    file.write_text(whole)
    metrics = world.folder / "metrics.jsonl"
    lines = rows(metrics)
    put(metrics, lines[:1] + lines[2:])
    assert check(world).problems == ["metrics.jsonl has no line for steps 2"]
    put(metrics, [*lines, lines[1]])
    assert check(world).problems == ["metrics.jsonl has more than one line for steps 2"]
    put(metrics, [lines[0].replace('"ticket/trained": 2', '"ticket/trained": 3'), *lines[1:]])
    assert check(world).problems == [
        "step 1: metrics.jsonl and the ledger file disagree on trained"
    ]
    put(metrics, [*lines[:2], "{", *lines[3:]])
    damaged = f"{metrics}: line 3 does not hold the metrics of a step; later lines were not read"
    assert check(world).problems == [damaged, "metrics.jsonl has no line for steps 3"]
    put(metrics, lines)
    assert check(world).ok


async def test_a_step_trained_twice_under_two_numbers_fails(tmp_path: Path) -> None:
    world = await a_run(tmp_path, answer=kit.group_only)
    path = ledger_file(world)
    lines = rows(path)
    again = next(json.loads(line) for line in lines if json.loads(line)["state"] == "trained")
    at = next(i for i, line in enumerate(lines) if json.loads(line).get("step") == 3)
    put(path, [*lines[:at], json.dumps(again | {"step": 3}), *lines[at:]])
    report = check(world)
    assert report.trained_twice == {again["ticket"]}
    assert not report.ok


async def test_groups_that_were_not_selected_count_as_filtered(tmp_path: Path) -> None:
    world = await a_run(tmp_path, answer=kit.group_only, keep_fraction=0.5)
    report = check(world, log=True, tap=True)
    assert report.problems == []
    assert (report.counts["trained"], report.counts["filtered"], report.counts["open"]) == (4, 4, 0)


async def test_a_damaged_file_and_a_missing_one(tmp_path: Path) -> None:
    world = await a_run(tmp_path)
    path = ledger_file(world)
    lines = rows(path)
    put(path, [*lines[:9], "gibberish", *lines[10:]])
    assert check(world).problems[0].startswith("step-000000.jsonl:10: ")
    path.unlink()
    with pytest.raises(
        UserError, match=r"/ledger: no ledger files; the learner has not begun to train"
    ):
        check(world)


async def test_a_run_that_began_without_a_ledger_file_is_told_so(tmp_path: Path) -> None:
    world = kit.World(tmp_path / "run", kit.group_only)
    with pytest.raises(kit.Killed):
        await world.learn(die_at=6)
    ledger_file(world).unlink()
    await world.learn()
    assert (
        check(world).problems[0]
        == "the ledger file begins at step 2: the states of tickets 1-8 are not recorded"
    )


def lines_of(steps: int) -> list[LedgerLine]:
    """A run of this many steps in which every group is good."""
    ledger, scribe = Ledger(kit.rules(steps=steps)), LedgerLineBuilder()
    lines = [scribe.summary(ledger.rules), *scribe.begin(ledger.open_credit(), ledger)]
    for seq in range(1, 2 * steps + 1):
        lines += scribe.record(
            ledger.apply(GroupArrival(seq, ledger.state.version, (0.0, 1.0)), seq),
            seq=seq,
            bounds=(ledger.state.version,) * 2,
        )
        if ledger.full:
            taken = list(ledger.state.taken)
            lines += scribe.step(
                taken, [entry.number for entry in taken], ledger.complete_step(), ledger
            )
    return lines


def test_a_long_run_is_audited_in_linear_time() -> None:
    def cpu_s(steps: int) -> float:
        lines, found, report = lines_of(steps), [], AuditReport()
        metrics = [{"step": step} for step in range(1, steps + 1)]
        for _ in range(3):
            began = time.process_time()
            tally = LedgerAudit(lines, report)
            check_metrics(metrics, tally, report)
            tally.check()
            found.append(time.process_time() - began)
        assert report.problems == []
        assert report.counts["trained"] == 2 * steps
        return min(found)

    cpu_s(100)
    # 10 if it is linear, 100 if each step looks at all of them
    assert cpu_s(2000) < 20 * cpu_s(200)


def test_a_tap_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "tap.jsonl"
    with pytest.raises(UserError, match=r"^\S*tap\.jsonl: No such file or directory$"):
        tap_records.read_tap(path)
    path.write_text('{"n": 1, "event": "open"}\n{"event": "open"}\n')
    with pytest.raises(
        DataError, match=r"tap\.jsonl:2: expected a tap's line, with `n` and `event`"
    ):
        tap_records.read_tap(path)
    path.write_text('{"n": 1, "event": "open"}\n{"n": 2, "ev')
    assert tap_records.read_tap(path) == [{"n": 1, "event": "open"}]


def test_ranges() -> None:
    assert format_ranges([3, 1, 2, 7, 9, 10]) == "1-3, 7, 9-10"
    assert format_ranges(range(0, 40, 2)) == "0, 2, 4, 6, 8, 10, 12, 14 and 12 more places"


async def test_removed_groups_are_not_lost(tmp_path: Path) -> None:
    """The archive keeps 3 groups; the audit says so, and still names a gap behind them."""
    world = kit.World(tmp_path / "run", keep=3, steps=12)
    with pytest.raises(kit.Killed):
        await world.learn(die_at=20)
    await world.learn()
    report = check(world, log=True, tap=True)
    folder = world.folder / "samples"
    before = archive_trim.read_trim(folder).before
    assert before > 20
    assert (report.problems, report.lost, report.not_archived, report.ok) == ([], set(), 0, True)
    note = f"records before {before} are no longer there: the archive keeps the newest 3 groups"
    assert f"{note} (samples.keep)" in report.notes
    archive_files(folder)[1][1].unlink()
    gap = before + 1
    assert check(world).problems == [f"the archive: records {gap} are missing"]
    # As a power loss in the middle of a removal leaves it.
    (folder / archive_trim.FILE).write_text(f'{{"before": {gap + 1}, "keep": 3}}')
    assert check(world).problems == []
