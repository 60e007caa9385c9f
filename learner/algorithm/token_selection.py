"""Selects tokens of a whole step for the losses that treat some differently. Pure, no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from learner.algorithm.samples import TrainSample
from learner.config import AlgorithmSection

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]


def select_in_band(
    covariances: FloatArray, algorithm: AlgorithmSection, seed: Sequence[int]
) -> BoolArray:
    """Draw tokens whose covariance is in [cov_low, cov_high]: at most ``cov_share`` of all.

    Clip-Cov (arXiv 2505.22617).

    Args:
        covariances: (T,); -inf for tokens that are not eligible.
        seed: of the draw.

    Returns:
        (T,)
    """
    eligible = np.flatnonzero(
        (covariances >= algorithm.cov_low) & (covariances <= algorithm.cov_high)
    )
    count = min(_num_selected(len(covariances), algorithm), len(eligible))
    chosen = np.random.default_rng(list(seed)).permutation(eligible)[:count]
    selected = np.zeros(len(covariances), dtype=bool)
    selected[chosen] = True
    return selected


def select_largest(
    covariances: FloatArray, algorithm: AlgorithmSection, seed: Sequence[int]
) -> BoolArray:
    """Take the tokens of the largest covariance: ``cov_share`` of all.

    KL-Cov (arXiv 2505.22617). Of equal ones the first are taken; see ``select_in_band``.
    """
    order = np.argsort(-covariances, kind="stable")[: _num_selected(len(covariances), algorithm)]
    selected = np.zeros(len(covariances), dtype=bool)
    selected[order] = True
    return selected & np.isfinite(covariances)


SELECTORS: Final[dict[str, Callable[[FloatArray, AlgorithmSection, Sequence[int]], BoolArray]]] = {
    "clip_cov": select_in_band,
    "kl_cov": select_largest,
}


def select_tokens(samples: Sequence[TrainSample], algorithm: AlgorithmSection) -> list[TrainSample]:
    """Return a step's samples with the tokens that the loss ``pg_variant`` treats differently.

    The seed of a draw is the step's tickets, so that a resumed learner draws the same.

    Args:
        samples: scored, with ``proximal_logprobs``.

    Raises:
        ValueError: if samples are not scored.
    """
    trained = [sample for sample in samples if sample.num_tokens]
    if not trained:
        return list(samples)
    logprobs = np.concatenate([_proximal(sample)[sample.positions] for sample in trained])
    advantages = np.concatenate([sample.advantages[sample.positions] for sample in trained])
    covariances = token_covariances(logprobs, advantages)
    # The backward pass leaves out sequences without an advantage.
    covariances[advantages == 0] = -np.inf
    tickets = sorted({sample.group for sample in samples})
    selected = SELECTORS[algorithm.pg_variant](covariances, algorithm, tickets)
    parts = iter(np.split(selected, np.cumsum([sample.num_tokens for sample in trained])[:-1]))
    marked = []
    for sample in samples:
        column = np.zeros(len(sample.token_ids), np.uint8)
        if sample.num_tokens:
            column[sample.positions] = next(parts)
        marked.append(replace(sample, selected=column))
    return marked


def token_covariances(logprobs: npt.ArrayLike, advantages: npt.ArrayLike) -> FloatArray:
    """Return ``(log p - mean log p) (A - mean A)``, (T,), means over the T tokens."""
    log_p: FloatArray = np.asarray(logprobs, np.float64)
    values: FloatArray = np.asarray(advantages, np.float64)
    covariances: FloatArray = (log_p - log_p.mean()) * (values - values.mean())
    return covariances


def _num_selected(num_tokens: int, algorithm: AlgorithmSection) -> int:
    return max(int(algorithm.cov_share * num_tokens), 1)


def _proximal(sample: TrainSample) -> Any:
    if sample.proximal_logprobs is None:
        raise ValueError("tokens are selected by logprobs, and the samples are not scored")
    return sample.proximal_logprobs
