"""What a step that trains as its groups come keeps of them, and how many it lets wait."""

from __future__ import annotations

import asyncio
import threading
import tracemalloc
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from large_groups import MB, group

from broker.contract import wire
from broker.errors import UserError
from learner import training as training_module
from learner.algorithm.packing import MicroBatchCutter
from learner.algorithm.samples import TrainSample
from learner.algorithm.token_figures import TokenFigures
from learner.config import AlgorithmSection
from learner.credit.ticket_rules import DomainRule, TicketRules
from learner.training import TrainingThread

VOCABULARY = 1000


class GatedBackend:
    """A backend that trains once its gate is open, and records what it trained on."""

    vocab_size = VOCABULARY

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.tickets: list[int] = []
        self.records, self.recorded = False, list[TrainSample]()

    def cutter(self) -> MicroBatchCutter[TrainSample]:
        return MicroBatchCutter(1000)

    def forward_backward(self, samples: Sequence[TrainSample]) -> dict[str, float]:
        self.gate.wait(60)
        self.tickets += [sample.group for sample in samples]
        self.recorded += samples if self.records else []
        return {}

    def record_tokens(self) -> bool:
        self.records = True
        return True

    def take_recorded(self) -> dict[int, TokenFigures]:
        samples, self.recorded = self.recorded, []
        columns = ((sample, np.full(2, sample.group, np.float16)) for sample in samples)
        return {id(sample): TokenFigures(column, column) for sample, column in columns}

    def step(self) -> dict[str, float]:
        return {}

    def follow_rules(self, *, steps: int, seed: int) -> None:
        pass

    def close(self) -> None:
        pass


def zeros(trajectories: Sequence[wire.Trajectory], _: AlgorithmSection) -> list[Any]:
    return [np.zeros(len(one.loss_mask.array())) for one in trajectories]


async def open_training(backend: GatedBackend, *, record_tokens: bool = False) -> TrainingThread:
    build: Any = lambda: backend  # noqa: E731
    training = TrainingThread(build, zeros, AlgorithmSection(), record_tokens=record_tokens)
    await training.open()
    return training


@pytest.mark.parametrize("record_tokens", [False, True])
async def test_trained_groups_are_freed_before_the_step_ends(record_tokens: bool) -> None:
    backend = GatedBackend()
    training = await open_training(backend, record_tokens=record_tokens)
    tracemalloc.start()
    try:
        for ticket in range(1, 31):
            training.add(group(ticket, MB), is_settled=True)
            await training.call(lambda: None)
        kept_bytes = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert kept_bytes < 4 * MB  # the newest waits in the cutter
    step = await training.finish(version=3)
    assert step is not None
    assert (step.num_samples, step.num_tokens) == (30, 30 * (MB // 9))
    assert backend.tickets == list(range(1, 31)) == list(step.tickets)
    if record_tokens:
        assert step.tokens is not None
        assert {ticket: figures[0].entropy[0] for ticket, figures in step.tokens.items()} == {
            ticket: float(ticket) for ticket in range(1, 31)
        }
    training.close()


async def test_groups_are_kept_while_their_rules_may_change() -> None:
    """They are trained on again if a record changes what the step keeps."""
    backend = GatedBackend()
    training = await open_training(backend)
    for ticket in range(1, 4):
        training.add(group(ticket, MB // 100))
    await training.call(lambda: None)
    assert [len(kept.trajectories) for kept in training._groups] == [1, 1, 1]
    training.close()


async def test_step_whose_freed_groups_are_needed_again_ends_the_run() -> None:
    backend = GatedBackend()
    training = await open_training(backend)
    for ticket in range(1, 4):
        training.add(group(ticket, MB // 100), is_settled=True)
    domain = DomainRule("lake", 1.0, 1, 1, 600.0)
    with pytest.raises(
        UserError, match=r"step 4: another learner has changed its rules; start this one again"
    ):
        await training.finish(3, TicketRules(10, 3, 1, "drop", 0, (domain,), keep_fraction=0.4))
    training.close()


async def test_reader_waits_while_the_thread_has_enough_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(training_module, "BACKLOG_BYTES", int(1.5 * MB))
    backend = GatedBackend()
    training = await open_training(backend)
    backend.gate.clear()
    for ticket in range(1, 4):
        await asyncio.wait_for(training.has_room(), 60)
        training.add(group(ticket, MB))
    waiting = asyncio.ensure_future(training.has_room())
    await asyncio.wait([waiting], timeout=0.1)
    assert not waiting.done()
    backend.gate.set()
    await asyncio.wait_for(waiting, 60)
    training.close()


async def test_failed_thread_leaves_no_reader_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_module, "BACKLOG_BYTES", 0)
    backend = GatedBackend()
    training = await open_training(backend)
    training.abandon()
    training.add(group(1, MB))
    await asyncio.wait_for(training.has_room(), 60)
    training.close()
