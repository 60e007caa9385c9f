"""Which tokens of a step the losses by covariance treat differently, by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from broker.settings.registry import resolve
from learner.algorithm.losses import LOSSES
from learner.algorithm.samples import TrainSample
from learner.algorithm.token_selection import (
    SELECTORS,
    select_in_band,
    select_largest,
    select_tokens,
    token_covariances,
)
from learner.config import AlgorithmSection


def sample(group: int, proximal: list[float], advantages: list[float]) -> TrainSample:
    """Token 0 is a prompt; the others are trained."""
    n = len(proximal) + 1
    mask = np.ones(n, np.uint8)
    mask[0] = 0
    return TrainSample(
        token_ids=np.zeros(n, np.int32),
        loss_mask=mask,
        rollout_logprobs=np.zeros(n, np.float32),
        versions=np.zeros(n, np.int32),
        advantages=np.array([0.0, *advantages], np.float32),
        group=group,
        reward=0.0,
        proximal_logprobs=np.array([0.0, *proximal], np.float32),
    )


def selections(samples: Sequence[TrainSample]) -> list[list[int]]:
    return [one.selected.tolist() for one in samples if one.selected is not None]


def test_covariances_by_hand() -> None:
    # Means -2 and 0: (-1 + 2) * 1, (-3 + 2) * 1, (-1 + 2) * -1, (-3 + 2) * -1.
    values = token_covariances([-1.0, -3.0, -1.0, -3.0], [1.0, 1.0, -1.0, -1.0])
    assert values.tolist() == [1.0, -1.0, -1.0, 1.0]


def test_a_band_is_drawn_from_and_the_largest_are_taken() -> None:
    values = np.array([0.5, 2.0, 3.0, 6.0])
    half = AlgorithmSection(cov_share=0.5, cov_low=1.0, cov_high=5.0)
    assert select_in_band(values, half, [7]).tolist() == [False, True, True, False]
    quarter = AlgorithmSection(cov_share=0.25, cov_low=1.0, cov_high=5.0)
    draws = [select_in_band(values, quarter, [seed]) for seed in range(20)]
    assert all(draw.sum() == 1 for draw in draws)
    assert {int(np.flatnonzero(draw)[0]) for draw in draws} == {1, 2}
    assert np.array_equal(draws[3], select_in_band(values, quarter, [3]))
    assert select_largest(values, half, []).tolist() == [False, False, True, True]
    # at least one
    assert select_largest(values, AlgorithmSection(), []).tolist() == [False, False, False, True]


def test_tokens_are_compared_over_the_whole_step() -> None:
    # As above, in two samples: 1, -1, -1, 1. Of 0.4 * 4 tokens one is taken, the first of the largest.
    section = AlgorithmSection(pg_variant="kl_cov", cov_share=0.4)
    samples = [sample(1, [-1.0, -3.0], [1.0, 1.0]), sample(2, [-1.0, -3.0], [-1.0, -1.0])]
    assert selections(select_tokens(samples, section)) == [[0, 1, 0], [0, 0, 0]]


def test_tokens_without_an_advantage_are_never_selected() -> None:
    # Means -3 and 0.5: (-9 + 3) (0 - 0.5) = 3 is the largest, and 3 * 0.5 = 1.5 twice the next.
    section = AlgorithmSection(pg_variant="kl_cov", cov_share=0.25)
    samples = [sample(1, [-9.0, -3.0], [0.0, 0.0]), sample(2, [0.0, 0.0], [1.0, 1.0])]
    assert selections(select_tokens(samples, section)) == [[0, 0, 0], [0, 1, 0]]


def test_rows_without_tokens_pass_through_and_scores_are_required() -> None:
    section = AlgorithmSection(pg_variant="clip_cov")
    one = sample(1, [-1.0], [1.0])
    untrained = dataclasses.replace(one, loss_mask=np.zeros(2, np.uint8))
    assert select_tokens([untrained], section)[0].selected is None
    assert select_tokens([one, untrained], section)[1].selected.tolist() == [0, 0]  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="not scored"):
        select_tokens([dataclasses.replace(one, proximal_logprobs=None)], section)


def test_losses_that_declare_a_selection_have_a_selector() -> None:
    traits: dict[str, Any] = {name: resolve("losses", name, LOSSES).traits for name in LOSSES}
    assert {name for name, found in traits.items() if found.selects_tokens} == set(SELECTORS)
