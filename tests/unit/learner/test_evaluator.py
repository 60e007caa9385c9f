"""The service around evaluations, with a log that is a list."""

from __future__ import annotations

import asyncio
import errno
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from run_folder_kit import group

from broker.contract import wire
from broker.errors import UserError
from broker.jetstream.bus import LogRecord
from broker.runtime.process import Stop
from broker.settings.config import DomainSection
from broker.settings.schema.model import ModelSection
from learner.config import EvalSection
from learner.disk_retry import DiskRetry
from learner.evaluation.evaluation import Evaluation, EvaluationQueue
from learner.evaluation.evaluator import Evaluator
from learner.reporting.transcripts import Transcript, TranscriptFactory
from rlearner.evaluate.run import wait_until_measured


class Log:
    """Stands for the bus: every ticket is in the log at once, as a group."""

    name = "learner"

    def __init__(self) -> None:
        self.records: asyncio.Queue[LogRecord] = asyncio.Queue()
        # tickets below 20 whose parts are kept, after each evaluation
        self.kept: list[list[int]] = []

    async def last_seq(self, stream: object) -> int:
        return 0

    async def trim_parts(self, log: object, keep: Callable[[int], bool]) -> None:
        self.kept.append([number for number in range(1, 20) if keep(number)])

    async def publish(self, stream: object, asked: wire.EvalTicket, **how: Any) -> int:
        made = wire.Ticket(
            number=asked.number,
            domain=asked.domain,
            task_index=asked.task_index,
            seed=1,
            min_version=0,
            max_staleness=0,
            group_size=2,
            min_group_size=2,
            deadline_s=9.0,
        )
        self.records.put_nowait(
            LogRecord(asked.number, group(made, eval_step=0), "", asked.number, b"")
        )
        return asked.number

    async def read_log(
        self, stream: object, start: int, *, wanted: Callable[[int], bool]
    ) -> AsyncIterator[LogRecord]:
        while True:
            yield await self.records.get()


class Full:
    """A disk that refuses ``times`` files."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
        self.left, self.refused, write = times, asyncio.Event(), Path.write_bytes
        loop = asyncio.get_running_loop()

        def write_bytes(path: Path, data: bytes) -> int:
            if self.left:
                self.left -= 1
                loop.call_soon_threadsafe(self.refused.set)
                raise OSError(errno.ENOSPC, "No space left on device")
            return write(path, data)

        monkeypatch.setattr(Path, "write_bytes", write_bytes)
        monkeypatch.setattr("learner.disk_retry.FIRST_WAIT_S", 0.01)


def evaluator(folder: Path, stop: Stop) -> Evaluator:
    domains = {"lake": DomainSection(env="lake", max_turns=1, deadline_s=9)}
    evaluations = EvaluationQueue(
        EvalSection(tasks=2, every_steps=1, timeout_s=600), domains, seed=1
    )
    patience = DiskRetry(folder, stop, "nothing is kept")
    return Evaluator(
        Log(),
        evaluations,
        None,
        folder / "evals",
        "",
        patience,
        TranscriptFactory(ModelSection(), folder),
    )  # type: ignore[arg-type]


async def test_episodes_wait_for_space_and_so_does_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, stop = Full(monkeypatch, 3), Stop()
    evaluating = evaluator(tmp_path, stop)
    evaluating.start(4, "actor", 0)
    async with asyncio.TaskGroup() as group_of_tasks:
        tasks = [group_of_tasks.create_task(work) for work in evaluating.services()]
        await disk.refused.wait()
        await evaluating.drain(stop.asked)
        for task in tasks:
            task.cancel()
    assert disk.left == 0
    assert evaluating.completed[0].rows == []  # they stand in the file; numbers alone are kept
    rows = [
        json.loads(line)
        for line in (tmp_path / "evals" / "actor-step-000004.jsonl").read_text().splitlines()
    ]
    assert [(row["domain"], row["task_index"], len(row["reward"])) for row in rows] == [
        ("lake", 0, 2),
        ("lake", 1, 2),
    ]
    # by their numbers, for there is no tokenizer
    assert [(row["prompt"], row["text"]) for row in rows] == [("3 7", "4 4")] * 2
    assert evaluating.take(last=True)["eval/num_episodes"] == 4
    assert evaluating._bus.kept == [list(range(3, 20))]  # type: ignore[attr-defined]  # 1 and 2 have ended


async def test_a_measurement_alone_waits_for_its_episodes_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, stop = Full(monkeypatch, 50), Stop()
    evaluating = evaluator(tmp_path, stop)
    evaluating.start(0, "evaluated", 0)
    asked = evaluating._evaluations.pending[0]
    fleet: Any = SimpleNamespace(failed=False, watch=lambda: [])
    async with asyncio.TaskGroup() as group_of_tasks:
        tasks = [group_of_tasks.create_task(work) for work in evaluating.services()]
        await disk.refused.wait()
        # all but the file
        assert (asked.waiting, evaluating.completed, evaluating.busy) == (set(), [asked], True)
        disk.left = 2
        await wait_until_measured(fleet, evaluating, asked, stop, quiet=True)
        for task in tasks:
            task.cancel()
    assert not evaluating.busy
    assert len((tmp_path / "evals" / "evaluated-step-000000.jsonl").read_text().splitlines()) == 2


class Offers:
    """Stands for the roster."""

    def __init__(self, *policies: str) -> None:
        self.policies = policies

    def alive(self, role: str) -> list[Any]:
        return [SimpleNamespace(policy=policy, state="serving") for policy in self.policies]


def won(policy: str, step: int, *successes: tuple[int, list[bool]]) -> Evaluation:
    """An evaluation that came to this, task by task."""
    made = Evaluation(step, policy, set(), 0.0)
    for index, flags in successes:
        ticket = wire.Ticket(
            number=index + 1, domain="lake", task_index=index, seed=1, min_version=0, max_staleness=0,
            group_size=len(flags),
            min_group_size=1, deadline_s=9.0,
        )  # fmt: skip
        whole = group(ticket, eval_step=step)
        of_one = [
            msgspec.structs.replace(
                whole.trajectories[0], episode=n, success=flag, reward=float(flag)
            )
            for n, flag in enumerate(flags)
        ]
        made.add(msgspec.structs.replace(whole, trajectories=of_one))
    return made


def test_two_policies_on_the_same_tasks() -> None:
    ours = won(
        "actor", 10, (0, [True, True]), (1, [True, False]), (2, [True, True]), (3, [False, False])
    )
    # one task came to nothing
    theirs = won("old", 10, (0, [True, False]), (1, [False, False]), (2, [True, True]))
    assert theirs.values() == {
        "eval/old/step": 10.0,
        "eval/old/success_rate": 0.5,
        "eval/old/reward_mean": 0.5,
        "eval/old/domain/lake/success_rate": 0.5,
    }
    # Task by task the actor is ahead by 1/2, 1/2 and 0: mean 1/3, variance 1/12.
    assert ours.ahead(theirs) == {
        "ahead": pytest.approx(1 / 3),
        "ahead_stderr": pytest.approx((1 / 12 / 3) ** 0.5),
    }
    assert ours.ahead(won("old", 10, (0, [True]))) == {}


async def test_others_are_measured_whenever_the_actor_is_and_shown_beside_it(
    tmp_path: Path,
) -> None:
    stop = Stop()
    evaluations = EvaluationQueue(
        EvalSection(tasks=2, every_steps=5, timeout_s=600),
        {"lake": DomainSection(env="lake", deadline_s=9)},
        seed=1,
    )
    roster: Any = Offers("actor", "old")
    made = Evaluator(
        Log(),
        evaluations,
        roster,
        tmp_path,
        "",
        DiskRetry(tmp_path, stop, "x"),
        TranscriptFactory(ModelSection(), tmp_path),
        ["old", "absent"],
    )  # type: ignore[arg-type]
    made.step_completed(4, 20)
    assert evaluations.pending == []
    made.step_completed(5, 20)
    assert [(one.policy, one.step) for one in evaluations.pending] == [("actor", 5), ("old", 5)]
    old, actor = (
        won("old", 5, (0, [False]), (1, [False])),
        won("actor", 5, (0, [True]), (1, [False])),
    )
    await made._finish(old)
    assert made.take(last=False) == {}  # it waits for the actor's
    await made._finish(actor)
    shown = made.take(last=False)
    assert (shown["eval/success_rate"], shown["eval/old/success_rate"]) == (0.5, 0.0)
    assert (shown["eval/old/actor_ahead"], shown["eval/old/actor_ahead_stderr"]) == (0.5, 0.5)
    assert made.take(last=True) == {}


def write_file(folder: Path, evaluation: Evaluation) -> None:
    rows = [row.plain(Transcript("p", "t", 1.0, success=True)) for row in evaluation.rows]
    folder.mkdir(exist_ok=True)
    name = f"{evaluation.policy}-step-{evaluation.step:06d}.jsonl"
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


async def test_restart_repeats_no_evaluation(tmp_path: Path) -> None:
    """It continues after step 20; its metrics have the first evaluation alone."""
    folder = tmp_path / "evals"
    start = won("actor", 0, (0, [False]), (1, [False]))
    newest = won("actor", 20, (0, [True]), (1, [False]))
    opponent = won("old", 20, (0, [False]), (1, [False]))
    lost = won("actor", 30, (0, [True]), (1, [True]))
    for evaluation in (start, newest, opponent, lost, won("random", 0, (0, [False]))):
        write_file(folder, evaluation)
    (folder / "actor-step-000010.jsonl").write_text('{"domain": "lake"}\n')  # damaged
    evaluations = EvaluationQueue(
        EvalSection(tasks=3, every_steps=10, timeout_s=600),
        {"lake": DomainSection(env="lake", deadline_s=9)},
        seed=1,
    )
    roster: Any = Offers("actor", "old", "random")
    log: Any = Log()
    evaluating = Evaluator(
        log,
        evaluations,
        roster,
        folder,
        "random",
        DiskRetry(tmp_path, Stop(), "x"),
        TranscriptFactory(ModelSection(), tmp_path),
        ["old"],
    )
    since = []

    def written_since(step: int) -> set[tuple[str, int]]:
        since.append(step)
        return {("actor", 0), ("random", 0)}

    await evaluating.restore(20, written_since)
    assert since == [0]
    evaluating.step_completed(20, 40)
    assert evaluations.pending == []
    assert not (folder / "actor-step-000030.jsonl").exists()
    assert evaluating.progress(20) == ("done", "success rate 0.5000 on 2 episodes")
    assert evaluating.take(last=False) == newest.values() | opponent.values() | {
        "eval/num_closed": 1.0,
        "eval/old/actor_ahead": 0.5,
        "eval/old/actor_ahead_stderr": 0.5,
    }
    evaluating.step_completed(30, 40)
    assert [(item.policy, item.step) for item in evaluations.pending] == [
        ("actor", 30),
        ("old", 30),
    ]


async def test_a_stop_on_a_full_disk_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, stop = Full(monkeypatch, 1_000_000), Stop()
    evaluating = evaluator(tmp_path, stop)
    evaluating.start(4, "actor", 0)
    tasks = [asyncio.create_task(work) for work in evaluating.services()]
    await disk.refused.wait()
    stop.request("test")
    with pytest.raises(UserError, match=r"No space left on device .*; asked to stop"):
        await tasks[1]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
