"""Scores of a step's samples: the same pieces, and the same training bit by bit, whenever its
groups arrive.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch_backend_kit as kit
from checkpoint_kit import state_of
from hypothesis import given
from hypothesis import strategies as st

from broker.contract import wire
from broker.settings.registry import resolve
from learner.algorithm.advantages import ADVANTAGES
from learner.algorithm.packing import MicroBatchCutter
from learner.algorithm.samples import SampleScores, TrainSample
from learner.algorithm.score_stream import ScoreStream
from learner.config import AlgorithmSection, TrainSection
from learner.training import TrainingThread


def sample(group: int, length: int) -> TrainSample:
    """A sample of which a forward pass reads ``length`` tokens; without trained tokens for 0."""
    n = length + 1
    mask = np.zeros(n, np.uint8)
    mask[-1] = length > 0
    zeros = np.zeros(n, np.float32)
    return TrainSample(
        np.full(n, length, np.int32), mask, zeros, np.zeros(n, np.int32), zeros, group, 0.0
    )


@given(
    groups=st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4), min_size=1, max_size=8),
    budget=st.integers(1, 20),
    packed=st.booleans(),
)
def test_the_pieces_and_the_order_of_scores_do_not_depend_on_arrival(
    groups: list[list[int]], budget: int, packed: bool
) -> None:
    samples = [
        [sample(number, length) for length in lengths] for number, lengths in enumerate(groups)
    ]
    flat = [one for group in samples for one in group]
    pieces: list[list[int]] = []

    def score(piece: Sequence[TrainSample]) -> list[SampleScores]:
        pieces.append([id(one) for one in piece])
        return [SampleScores(logprobs=np.array([id(one)])) for one in piece]

    early = ScoreStream(MicroBatchCutter(budget, packed=packed), score)
    for _ in range(2):  # two steps
        pieces.clear()
        for group in samples:
            early.add(group)
        found = early.finish(flat)
        first = list(pieces)
        pieces.clear()
        late = ScoreStream(MicroBatchCutter(budget, packed=packed), score).finish(flat)
        assert pieces == first
        for scores in (found, late):
            assert [one.logprobs.tolist() for one in scores if one.logprobs is not None] == [
                [id(one)] for one in flat
            ]


def group(rng: np.random.Generator, ticket: int) -> wire.Group:
    def trajectory(episode: int) -> wire.Trajectory:
        n = int(rng.integers(4, 24))
        start = int(rng.integers(1, n - 1))
        sampled = n - start
        return wire.Trajectory(
            episode=episode,
            token_ids=wire.column(rng.integers(0, kit.VOCAB, n), "<i4"),
            loss_mask=wire.column([0] * start + [1] * sampled, "|u1"),
            logprobs=wire.column([0.0] * start + [-3.1] * sampled, "<f4"),
            version_runs=wire.column([0, sampled], "<i4"),
            turns=[
                wire.Turn(
                    start=start, end=n, reward=1.0, valid=True, finish_reason="stop", server="s"
                )
            ],
            reward=float(rng.normal()),
            reward_parts={},
            success=False,
            end="terminated",
        )

    return wire.Group(
        ticket=ticket, domain="lake", task_index=0, min_version=0, hub="h", deliveries=1, pools=[],
        trajectories=[trajectory(i) for i in range(3)],
    )  # fmt: skip


ALGORITHMS: dict[str, dict[str, Any]] = {
    "critic": {"adv_estimator": "gae", "critic": {"enabled": True, "lr": 1e-2}, "num_epochs": 2},
    "kl in reward": {"adv_estimator": "reinforce++", "kl_coef": 0.3, "kl_placement": "reward"},
    "recomputed": {"correction": "tis", "num_minibatches": 2},
}


@pytest.mark.parametrize("name", ALGORITHMS)
async def test_training_is_the_same_whether_scoring_begins_early(name: str, tmp_path: Path) -> None:
    path, algorithm = (
        kit.save_model(tmp_path / "model"),
        AlgorithmSection.model_validate(ALGORITHMS[name]),
    )
    train = TrainSection(lr=1e-2, device="cpu", num_threads=1, micro_batch_tokens=60)
    estimator = resolve("advantages", algorithm.adv_estimator, ADVANTAGES)
    found = []
    for stream in (True, False):
        training = TrainingThread(
            lambda: kit.backend(path, train=train, algorithm=algorithm),
            estimator,
            algorithm,
            stream=stream,
        )
        backend = await training.open()
        rng, metrics, early = np.random.default_rng(0), [], 0
        plain, calls = backend.score, []
        backend.score = lambda samples, plain=plain, calls=calls: (
            calls.append(len(samples)) or plain(samples)
        )  # type: ignore[method-assign, misc]
        for step in range(2):
            calls.clear()
            for ticket in range(4):
                training.add(group(rng, 4 * step + ticket + 1))
                await training.call(lambda: None)
                await asyncio.sleep(0)
            early += len(calls)
            trained = await training.finish(step)
            assert trained is not None
            assert sum(calls) == 12
            metrics.append(
                {key: value for key, value in trained.values.items() if not key.startswith("time/")}
            )
        assert (early > 0) == stream
        found.append((metrics, state_of(backend)))
        training.close()
    (streamed, weights), (waited, others) = found
    assert streamed == waited
    assert weights.keys() == others.keys()
    assert all(torch.equal(weights[key], others[key]) for key in weights)
