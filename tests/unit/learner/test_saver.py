"""Checkpoints beside training: what waits for what, with a real folder and made-up surroundings."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_kit import FakeSnapshot, tensors_of
from test_checkpoint import ledger_at
from waits import until

from broker.errors import Fenced, UserError
from broker.runtime.process import Stop
from broker.runtime.spans import SpanRecorder
from learner import disk_retry
from learner.backends.parts.hugging_face import StoredModel
from learner.checkpoints import checkpoint
from learner.checkpoints.saver import CheckpointSaver
from learner.config import CheckpointSection
from learner.credit.ledger import Ledger
from learner.credit.ticket_rules import DomainRule, TicketRules

RULES = TicketRules(
    steps=12,
    groups_per_step=1,
    max_staleness=1,
    on_late="wait",
    seed=0,
    domains=(DomainRule("lake", 1.0, 2, 2, 1.0),),
)


class World:
    """A backend whose only weight is the step, a broker that notes trims, a watch that can be
    fenced.
    """

    def __init__(self, folder: Path, **section: Any) -> None:
        self.folder, self.step, self.fenced = folder, 0, False
        self.trims: list[tuple[int, list[int]]] = []  # position, checkpoints on disk then
        self.kept: list[list[int]] = []  # tickets below 100 whose parts are kept
        self.gate, self.full = threading.Event(), False
        self.gate.set()
        self.stop, self.said = Stop(), list[str]()
        self.pressed = False
        self.backend, self.epoch, self.spans = self, 1, SpanRecorder()
        around: Any = self
        self.saver = CheckpointSaver(
            folder,
            CheckpointSection(**section),
            around,
            Ledger(RULES),
            around,
            around,
            around,
            self.stop,
            self.said.append,
            pressed=lambda: self.pressed,
        )

    # as a backend
    def snapshot(self) -> FakeSnapshot:
        return FakeSnapshot({"model.weight": torch.tensor([self.step])})

    def describe(self, path: Path) -> StoredModel:
        self.gate.wait()
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return StoredModel({"weight": ("I64", [1])}, same_names=True)

    # as the training thread, the records, the watch, the broker
    async def call(self, job: Callable[[], Any]) -> Any:
        return job()

    async def undo(self) -> None: ...
    async def sync(self) -> None: ...
    async def refuse_if_fenced(self) -> None:
        if self.fenced:
            raise Fenced("a newer learner took over")

    async def trim(self, _: object, before: int) -> None:
        self.trims.append((before, self.steps()))

    async def trim_parts(self, _: object, keep: Callable[[int], bool]) -> None:
        self.kept.append([number for number in range(1, 100) if keep(number)])

    def steps(self) -> list[int]:
        return [
            checkpoint.read_checkpoint(path).step
            for path in checkpoint.list_checkpoints(self.folder)
        ]

    async def train_to(self, last: int) -> None:
        while self.step < last:
            self.step += 1
            await self.saver.at_boundary(ledger_at(self.step))


async def test_training_goes_on_while_one_is_written_and_the_log_is_trimmed_after(
    tmp_path: Path,
) -> None:
    world = World(tmp_path, every_steps=2)
    world.gate.clear()
    await world.train_to(5)  # 2 is being written, 4 is due
    await asyncio.sleep(0.05)
    assert (world.steps(), world.trims) == ([], [])
    world.gate.set()
    await until(lambda: world.steps() == [2])
    parts = checkpoint.read_checkpoint(tmp_path / "step-000002").parts
    assert tensors_of(parts)["model.weight"].tolist() == [2]  # as it was, not as it is
    await until(lambda: not world.saver._busy)
    await world.train_to(7)  # 4's turn comes at 6, which is due as well: one is taken, of that step
    await until(lambda: world.steps() == [2, 6])
    await world.saver.finish(ledger_at(7))
    assert world.steps() == [6, 7]
    oldest = [Ledger.load(ledger_at(step)).first_kept for step in (2, 6)]
    assert world.trims == [(oldest[0], [2]), (oldest[0], [2, 6]), (oldest[1], [6, 7])]
    states = [Ledger.load(ledger_at(step)).state for step in (2, 6)]
    live_or_later = [
        [number for number in range(1, 100) if number in state.live or number > state.issued]
        for state in states
    ]
    assert world.kept == [live_or_later[0], *live_or_later]
    assert live_or_later[0][0] < live_or_later[1][0]
    values = world.saver.values()
    assert set(values) == {"time/checkpoint", "time/checkpoint_write"}
    assert world.saver.values() == {"time/checkpoint": 0.0}


def first_kept(step: int) -> int:
    return Ledger.load(ledger_at(step)).first_kept


async def test_a_store_that_fills_up_brings_checkpoints_forward_until_the_log_is_trimmed(
    tmp_path: Path,
) -> None:
    world = World(tmp_path, every_minutes=60, keep=2)
    await world.train_to(3)
    await asyncio.sleep(0.05)
    assert (world.steps(), world.trims) == ([], [])
    world.pressed = True
    for step in (4, 5):
        await world.train_to(step)
        await until(lambda: not world.saver._busy)
    world.pressed = False
    await world.train_to(8)
    await asyncio.sleep(0.05)
    # one is not enough: the log is trimmed behind the oldest that is kept
    assert world.steps() == [4, 5]
    assert world.trims == [(first_kept(4), [4]), (first_kept(4), [4, 5])]


async def test_where_tickets_wait_for_room_the_log_is_trimmed_behind_the_newest_checkpoint(
    tmp_path: Path,
) -> None:
    world = World(tmp_path, every_steps=2, keep=2)
    await world.train_to(2)
    await until(lambda: not world.saver._busy)
    await world.saver.relieve()
    assert world.trims == [(first_kept(2), [2])]  # there is nothing more to gain
    await world.train_to(5)
    await until(lambda: not world.saver._busy)
    for _ in range(3):
        await world.saver.relieve()
    assert world.trims[1:] == [(first_kept(2), [2, 4]), (first_kept(4), [2, 4])]
    assert world.kept[2] == [
        number for number in range(1, 100) if Ledger.load(ledger_at(4)).may_read(number)
    ]
    world.fenced = True
    await world.train_to(5)
    await world.saver.relieve()
    world.saver._relieved_step = -1
    with pytest.raises(Fenced):
        await world.saver.relieve()
    assert len(world.trims) == 3


async def test_log_is_not_given_up_behind_a_damaged_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One bit of the newest has flipped on the disk: what a resume from another one needs must
    stay.
    """
    world = World(tmp_path, every_steps=2, keep=3)
    for step in (2, 4, 6):
        await world.train_to(step)
        await until(lambda: not world.saver._busy)
    before = len(world.trims)
    flip_bit(tmp_path / "step-000006")
    await world.saver.relieve()
    assert world.trims[before:] == [(first_kept(4), [2, 4, 6])]
    assert (
        "part-00001-of-00001.safetensors is damaged: its digest is not that of the bytes written"
        in caplog.text
    )
    flip_bit(tmp_path / "step-000004")
    world.saver._relieved_step = -1
    await world.saver.relieve()
    assert len(world.trims) == before + 1
    await world.train_to(7)  # the next one is due at once
    await until(lambda: world.steps() == [4, 6, 7])


async def test_log_stays_behind_an_only_checkpoint_that_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run can begin again at the log's first record."""
    prune = checkpoint.prune_checkpoints

    def damaging(folder: Path, keep: int) -> list[Path]:
        kept = prune(folder, keep)
        if len(kept) == 1:
            flip_bit(kept[0])
        return kept

    monkeypatch.setattr(checkpoint, "prune_checkpoints", damaging)
    world = World(tmp_path, every_steps=2, keep=3)
    await world.train_to(2)
    await until(lambda: world.steps() == [2] and not world.saver._busy)
    assert world.trims == []
    await world.train_to(3)
    await until(lambda: world.steps() == [2, 3] and not world.saver._busy)
    assert world.trims == [(first_kept(2), [2, 3])]


def flip_bit(path: Path) -> None:
    (part,) = path.glob("learner/part-*.safetensors")
    data = bytearray(part.read_bytes())
    data[-1] ^= 1
    part.write_bytes(data)


async def test_a_learner_that_starts_trims_what_its_earlier_life_could_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(tmp_path, every_steps=2, keep=3)
    for step in (2, 4):
        await world.train_to(step)
        await until(lambda: not world.saver._busy)
    again = World(tmp_path, every_steps=2, keep=3)
    await again.saver.open()
    assert again.trims == [(first_kept(2), [2, 4])]
    (tmp_path / "step-000002" / "learner" / "learner.json").write_text("{")
    await again.saver.open()  # it resumes from the other one
    assert len(again.trims) == 1
    assert "the log is not trimmed behind it" in caplog.text


async def test_the_end_waits_for_what_is_being_written(tmp_path: Path) -> None:
    world = World(tmp_path, every_steps=2)
    world.gate.clear()
    await world.train_to(2)
    ending = asyncio.create_task(world.saver.finish(ledger_at(2)))
    await asyncio.sleep(0.05)
    assert not ending.done()
    world.gate.set()
    await ending
    assert world.steps() == [2]  # once


async def test_who_is_fenced_while_writing_names_nothing_and_trims_nothing(tmp_path: Path) -> None:
    world = World(tmp_path, every_steps=1)
    await world.train_to(1)
    await until(lambda: not world.saver._busy)
    trims = list(world.trims)
    world.gate.clear()
    await world.train_to(2)
    world.fenced = True
    world.gate.set()
    with pytest.raises(Fenced):
        await world.saver.finish(ledger_at(2))
    assert (world.steps(), world.trims) == ([1], trims)
    assert os.listdir(tmp_path) == ["step-000001"]
    assert world.stop.asked.is_set()


async def test_a_full_folder_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(disk_retry, "FIRST_WAIT_S", 0.01)
    world = World(tmp_path, every_steps=1)
    for step in (1, 2):
        await world.train_to(step)
        await until(lambda: not world.saver._busy)
    trims = list(world.trims)
    world.full = True
    await world.train_to(3)
    await until(lambda: world.saver._failing)
    await world.train_to(4)  # one fell due
    training = asyncio.create_task(world.train_to(8))
    await asyncio.sleep(0.1)
    assert world.step == 5  # as many fell due as are kept: training waits
    assert (world.steps(), world.trims) == ([1, 2], trims)
    world.full = False
    await training
    await world.saver.finish(ledger_at(8))
    assert world.steps()[-1] == 8
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]
    lines = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert lines[0].startswith(f"{tmp_path}: No space left on device (")
    assert lines[0].endswith(
        "; no checkpoint is written and the log is not trimmed until it can be written"
    )
    assert lines[1] == f"{tmp_path}: training waits until a checkpoint can be written"
    assert world.said[-1] == ""


async def test_a_stop_does_not_wait_for_space(tmp_path: Path) -> None:
    world = World(tmp_path, every_steps=1)
    world.full = True
    await world.train_to(1)
    await until(lambda: world.saver._failing)
    world.stop.request("test")
    with pytest.raises(UserError, match=r"No space left on device \(\d+ MiB free\); asked to stop"):
        await world.saver.finish(ledger_at(1))
    await world.saver.close()
