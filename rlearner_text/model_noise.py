"""Judges whether logprobs computed in two ways differ by more than the model from itself.

A model computed whole and in parts gives other logprobs, by rounding alone: 1e-6 for one, 0.3 for
another, a thousand times more for some tokens than for others. So a constant limit refuses good
models and lets wrong ones pass.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

LARGEST_RATIO: Final = 4.0  # of the largest differences: that of a few tokens is a matter of luck
MEAN_RATIO: Final = 3.0  # of the mean differences of a stretch of text

Values = npt.NDArray[np.float32]


def noise_limit(
    samples: Sequence[Values], *, epsilon: float, ratio: float = LARGEST_RATIO
) -> float:
    """Return the largest difference that rounding explains.

    Args:
        samples: arrays of the same logprobs, (n,) or (n, tokens of the vocabulary), each computed
            otherwise by the same model.
        epsilon: of the dtype in which they were computed: ``torch.finfo(dtype).eps``.
        ratio: how many times the model's largest difference from itself is still noise.
    """
    return ratio * float(_own_distances(samples).max(initial=0.0)) + _rounding_error(
        samples[0], epsilon
    )


def noise_problem(
    samples: Sequence[Values], judged: Values, *, epsilon: float, stretches: Sequence[int] = ()
) -> str:
    """Return how another way of computing differs by more than noise; empty if it does not.

    Args:
        samples, epsilon: as for ``noise_limit``.
        other: the logprobs to judge, of the same shape.
        stretches: lengths beyond which the model computes otherwise; each stretch of text between
            them is judged alone, since few tokens past a window are lost in the mean of all.
    """
    difference = _token_distances(judged, samples[0])
    noise = _own_distances(samples)
    rounding = _rounding_error(samples[0], epsilon)
    ends = sorted({0, len(difference), *(end for end in stretches if end < len(difference))})
    for start, end in itertools.pairwise(ends):
        largest = float(difference[start:end].max())
        mean = float(difference[start:end].mean())
        if not largest <= (limit := LARGEST_RATIO * float(noise.max()) + rounding):
            return (
                f"logprobs differ by up to {largest:.2g}, the model from itself by "
                f"{limit / LARGEST_RATIO:.2g}"
            )
        if not mean <= (
            limit := MEAN_RATIO * max(noise[start:end].mean(), noise.mean()) + rounding / 2
        ):
            place = f" at tokens {start} to {end}" if len(ends) > 2 else ""
            own = f"the model from itself by {limit / MEAN_RATIO:.2g}"
            return f"logprobs differ by {mean:.2g} on average{place}, {own}"
    return ""


def _own_distances(samples: Sequence[Values]) -> npt.NDArray[np.float64]:
    """Return for each token how far the samples lie apart from the first."""
    if len(samples) < 2:
        return np.zeros(len(samples[0]))
    distances: npt.NDArray[np.float64] = np.max(
        [_token_distances(sample, samples[0]) for sample in samples[1:]], axis=0
    )
    return distances


def _token_distances(values: Values, reference: Values) -> npt.NDArray[np.float64]:
    """Return the distance at each token: of logprobs (n,), or root mean square of (n, tokens of the
    vocabulary).
    """
    squares = (values.astype(np.float64) - reference) ** 2
    distance: npt.NDArray[np.float64] = np.sqrt(squares.reshape(len(squares), -1).mean(1))
    return distance


def _rounding_error(values: Values, epsilon: float) -> float:
    """Return the error of logprobs whose logits are rounded to a dtype: size times epsilon."""
    return epsilon / 4 * max(1.0, float(np.abs(values).mean()))
