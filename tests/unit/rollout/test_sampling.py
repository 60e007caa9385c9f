"""Sampling: the distribution drawn from is the one whose logprobs are returned, and the one
transformers' processors make.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from broker.contract.wire import SamplingParams
from rollout.engines.hf.sampling import SamplingBatch, sample, uniforms

GRID = 4000


def params(**changes: float) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 1, **changes})


def reference(logits: torch.Tensor, p: SamplingParams) -> torch.Tensor:
    """Probabilities after transformers' processors in the order in which generate applies them,
    shape (vocabulary,).
    """
    ids, scores = torch.zeros(1, 1, dtype=torch.long), logits[None].clone()
    if p.temperature != 1:
        scores = TemperatureLogitsWarper(p.temperature)(ids, scores)
    if p.top_k:
        scores = TopKLogitsWarper(p.top_k)(ids, scores)
    if p.top_p < 1:
        scores = TopPLogitsWarper(p.top_p)(ids, scores)
    if p.min_p:
        scores = MinPLogitsWarper(p.min_p)(ids, scores)
    return scores.softmax(-1)[0]


def measured(logits: torch.Tensor, p: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
    """Frequencies over an even grid of uniform numbers, and the logprob returned with each token
    (NaN: never drawn).
    """
    grid = (torch.arange(GRID, dtype=torch.float64) + 0.5) / GRID
    tokens, logprobs = sample(logits.expand(GRID, -1), SamplingBatch.of([p] * GRID), grid)
    found = torch.full_like(logits, float("nan"))
    found[tokens] = logprobs
    return torch.bincount(tokens, minlength=len(logits)) / GRID, found


@pytest.mark.parametrize(
    "p",
    [
        params(),
        params(temperature=0.7),
        params(temperature=1.9),
        params(top_k=3),
        params(top_k=500),
        params(top_p=0.6),
        params(top_p=0.01),
        params(min_p=0.2),
        params(temperature=0.5, top_k=6, top_p=0.8, min_p=0.1),
        params(temperature=1.4, top_k=4, top_p=0.9),
    ],
    ids=str,
)
# 300: several blocks of probabilities, the last one not full, and several pieces of the batch
@pytest.mark.parametrize("vocabulary", [7, 40, 300])
def test_the_distribution_is_that_of_transformers(p: SamplingParams, vocabulary: int) -> None:
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(vocabulary)) * 2
    expected = reference(logits, p)
    frequency, logprobs = measured(logits, p)
    assert torch.allclose(frequency, expected, atol=1.01 / GRID)
    drawn = ~logprobs.isnan()
    assert torch.equal(drawn, frequency > 0)
    torch.testing.assert_close(logprobs[drawn], expected[drawn].log(), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "p",
    [params(top_p=0.999), params(min_p=1e-3), params(top_k=1500, top_p=0.9), params(top_k=5)],
    ids=str,
)
def test_more_candidates_than_are_sorted_first(p: SamplingParams) -> None:
    """3,000 tokens of nearly equal probability: the first 1,024 do not hold what top-p keeps."""
    logits = torch.randn(3000, generator=torch.Generator().manual_seed(1)) * 0.3
    expected = reference(logits, p)
    grid = torch.rand(64, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    tokens, logprobs = sample(logits.expand(64, -1), SamplingBatch.of([p] * 64), grid)
    assert bool((expected[tokens] > 0).all())
    torch.testing.assert_close(logprobs, expected[tokens].log(), atol=1e-4, rtol=0)


def test_a_mixed_batch_gives_each_row_its_own() -> None:
    logits = torch.randn(5, 11, generator=torch.Generator().manual_seed(3))
    rows = [
        params(),
        params(temperature=0),
        params(top_k=2),
        params(temperature=0.5),
        params(top_p=0.5, temperature=2.0),
    ]
    uniform = torch.tensor([0.1, 0.9, 0.4, 0.7, 0.3], dtype=torch.float64)
    tokens, logprobs = sample(logits, SamplingBatch.of(rows), uniform)
    for row, p in enumerate(rows):
        alone = sample(logits[row : row + 1], SamplingBatch.of([p]), uniform[row : row + 1])
        assert tokens[row] == alone[0][0]
        torch.testing.assert_close(logprobs[row], alone[1][0], atol=1e-6, rtol=0)


def test_greedy_takes_the_best_with_logprob_zero() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 5.0, -1.0]])
    tokens, logprobs = sample(
        logits,
        SamplingBatch.of([params(temperature=0)] * 2),
        torch.tensor([0.99, 0.99], dtype=torch.float64),
    )
    assert tokens.tolist() == [1, 0]
    assert logprobs.tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    "p", [params(), params(temperature=0), params(top_k=2), params(top_p=0.5)], ids=str
)
def test_logits_that_are_not_finite_show_in_the_logprob(p: SamplingParams) -> None:
    logits = torch.tensor([[0.0, float("nan"), 1.0]])
    tokens, logprobs = sample(
        logits, SamplingBatch.of([p]), torch.tensor([0.5], dtype=torch.float64)
    )
    assert 0 <= int(tokens[0]) < 3
    assert not math.isfinite(float(logprobs[0]))


def test_impossible_tokens_are_never_drawn() -> None:
    logits = torch.tensor([float("-inf"), 0.0, float("-inf"), 0.0, float("-inf")])
    frequency, _ = measured(logits, params())
    assert frequency.tolist() == [0.0, 0.5, 0.0, 0.5, 0.0]
    edge = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    tokens, _ = sample(logits.expand(2, -1), SamplingBatch.of([params()] * 2), edge)
    assert tokens.tolist() == [1, 3]


def test_uniforms_depend_on_seed_and_position_only_and_are_uniform() -> None:
    seeds, positions = np.repeat(np.arange(200, dtype=np.uint64), 200), np.tile(np.arange(200), 200)
    values = uniforms(seeds, positions)
    assert values.min() >= 0
    assert values.max() < 1
    assert len(np.unique(values)) == len(values)
    order = np.random.default_rng(0).permutation(len(values))
    assert np.array_equal(uniforms(seeds[order], positions[order]), values[order])
    counts = np.histogram(values, bins=50, range=(0, 1))[0]
    chi2 = float(((counts - 800) ** 2 / 800).sum())
    assert chi2 < 86  # 49 degrees of freedom: exceeded once in a thousand
    grid = values.reshape(200, 200)
    assert abs(np.corrcoef(grid[:, :-1].ravel(), grid[:, 1:].ravel())[0, 1]) < 0.02
    assert abs(np.corrcoef(grid[:-1].ravel(), grid[1:].ravel())[0, 1]) < 0.02


def test_splitmix_as_published() -> None:
    """The finaliser against Vigna's splitmix64.c: seed 1234567 gives this first output."""
    from rollout.engines.hf.sampling import _GOLDEN, _mix

    with np.errstate(over="ignore"):
        assert int(_mix(np.array([1234567], np.uint64) + _GOLDEN)[0]) == 6457827717110365317
