"""The optimal token baseline by hand, and its energies on a real model."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from test_more_advantages import row
from torch_backend_kit import backend, samples, save_model

from learner.algorithm.advantages import optimal_token_baseline
from learner.algorithm.advantages.base import BatchRow
from learner.backends.models.token_scores import token_energies
from learner.config import AlgorithmSection


def with_energies(one: BatchRow, energies: list[float]) -> BatchRow:
    return dataclasses.replace(one, energies=np.array(energies))


def test_baselines_by_hand() -> None:
    # Returns 1, 1, 1 and 0, 0. Energies 1, 1, 1 and 3, 5: W = 1, 2, 3 and 3, 8. First token: B =
    # (1 * 1 + 0 * 3) / 4 = 0.25; second: (1 * 2 + 0 * 8) / 10 = 0.2; the third goes on alone: 0.
    rows = [
        with_energies(row([0.0, 0.0, 1.0]), [1.0, 1.0, 1.0]),
        with_energies(row([0.0, 0.0]), [3.0, 5.0]),
    ]
    found = optimal_token_baseline.estimate(rows, AlgorithmSection())
    assert found[0].advantages.tolist() == pytest.approx([0.75, 0.8, 1.0])
    assert found[1].advantages.tolist() == pytest.approx([-0.25, -0.2])


def test_certain_tokens_equal_returns_and_groups_of_one() -> None:
    # No energy so far: the plain mean. Equal returns: exactly 0, whatever the weights are.
    rows = [
        with_energies(row([1.0], group=0), [0.0]),
        with_energies(row([0.0], group=0), [0.0]),
        with_energies(row([0.1], group=1), [0.7]),
        with_energies(row([0.1], group=1), [0.3]),
        with_energies(row([4.0], group=2), [1.0]),
    ]
    found = optimal_token_baseline.estimate(rows, AlgorithmSection())
    assert [one.advantages.tolist() for one in found] == [[0.5], [-0.5], [0.0], [0.0], [0.0]]
    unmeasured = [dataclasses.replace(one, energies=None) for one in rows]
    with pytest.raises(ValueError, match="energies"):
        optimal_token_baseline.estimate(unmeasured, AlgorithmSection())


def test_discount_per_turn_by_hand() -> None:
    # Turns 0, 0, 1; reward 2 on the last. Per turn of 0.5: returns 1, 1, 2. The other row returns 0;
    # equal energies: half of each.
    first = with_energies(row([0.0, 0.0, 2.0]), [1.0, 1.0, 1.0])
    first = dataclasses.replace(first, turns=np.array([0, 0, 1]))
    other = with_energies(row([0.0, 0.0, 0.0]), [1.0, 1.0, 1.0])
    section = AlgorithmSection(gamma=0.5, discount="turn")
    found = optimal_token_baseline.estimate([first, other], section)
    assert found[0].advantages.tolist() == pytest.approx([0.5, 0.5, 1.0])


def test_energies_by_hand() -> None:
    # Probabilities 0.5, 0.25, 0.25, target 0: the gradient is 0.5, -0.25, -0.25, its squared norm
    # 0.375; target 1: -0.5, 0.75, -0.25: 0.875. At temperature 2 the logits are halved.
    logits = torch.tensor([[0.5, 0.25, 0.25]]).log().expand(2, 3)
    logprobs, energies = token_energies(logits, torch.tensor([0, 1]))
    assert logprobs.exp().tolist() == pytest.approx([0.5, 0.25])
    assert energies.tolist() == pytest.approx([0.375, 0.875])
    twice, _ = token_energies(2 * logits, torch.tensor([0, 1]), torch.full((2,), 2.0))
    assert twice.tolist() == pytest.approx(logprobs.tolist())


def test_models_measure_the_energies(tmp_path: Path) -> None:
    algorithm = AlgorithmSection(adv_estimator="optimal_token_baseline")
    trainer = backend(save_model(tmp_path), algorithm=algorithm)
    rows = samples(3, temperature=0.7)
    for one, scores in zip(rows, trainer.score(rows), strict=True):
        ids = torch.tensor(one.token_ids.astype(np.int64))
        where = torch.from_numpy(one.positions)
        logits = trainer.policy.module(input_ids=ids[None]).logits[0, where - 1].detach() / 0.7
        logits = logits.requires_grad_()
        logprobs = logits.log_softmax(-1)[torch.arange(len(where)), ids[where]]
        (slopes,) = torch.autograd.grad(logprobs.sum(), logits)
        assert scores.energies is not None
        assert scores.energies.tolist() == pytest.approx(
            torch.square(slopes).sum(-1).tolist(), abs=1e-5
        )
        assert scores.logprobs == pytest.approx(logprobs.detach().numpy(), abs=4e-6)
    assert backend(trainer.policy.path).score(rows)[0].energies is None
