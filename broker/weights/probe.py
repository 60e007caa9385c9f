"""The last check of new weights, by logprobs of fixed tokens: correct bytes may still be loaded
incorrectly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from broker.contract import wire
from broker.errors import OfferRefused

# In a mixture of experts a router with two almost equal experts takes the other one for a few
# tokens, by a rounding error. Weights that were loaded incorrectly change most tokens, or a few by
# several nats.
_FLIPPED: Final = 0.1  # of the tokens may differ by more than the tolerance,
_OUTLIER: Final = 8.0  # and those by this many times it


def make_probe(
    token_ids: Sequence[int], logprobs: npt.ArrayLike, *, tolerance: float
) -> wire.Probe:
    """Return the probe for an offer.

    Args:
        token_ids: n fixed tokens, n >= 2.
        logprobs: shape (n - 1,): log p(token[i + 1] | token[: i + 1]) under the offered weights,
            temperature 1.
        tolerance: largest absolute difference that a correct server may show, in nine of ten
            tokens; 0: every bit counts.
    """
    values = np.asarray(logprobs, dtype="<f4").reshape(-1)
    if len(token_ids) < 2 or len(values) != len(token_ids) - 1:
        raise ValueError(
            f"{len(token_ids)} probe tokens need {len(token_ids) - 1} logprobs, got {len(values)}"
        )
    return wire.Probe(
        token_ids=wire.column(token_ids, "<i4"),
        logprobs=wire.column(values, "<f4"),
        tolerance=tolerance,
    )


def check_probe(probe: wire.Probe, logprobs: npt.ArrayLike) -> float:
    """Compare the loaded weights' logprobs with the offer's; return the largest absolute
    difference.

    Args:
        logprobs: shape (n - 1,), computed by the server after loading, at temperature 1.

    Raises:
        OfferRefused: if they are not those of the offered weights, or the number of values differs.
    """
    expected = probe.logprobs.array()
    actual = np.asarray(logprobs, dtype=np.float32).reshape(-1)
    if actual.shape != expected.shape:
        raise OfferRefused(f"probe: {len(actual)} logprobs for {len(expected)} expected")
    if (worst := wrong_token(probe, actual)) is not None:
        if not probe.tolerance:
            raise OfferRefused(_describe_inexact(probe, actual, worst))
        difference = f"token {worst + 1} has logprob {actual[worst]:.6f}, the learner's is {expected[worst]:.6f}"
        tolerance = (
            f"tolerance {probe.tolerance:g}; the bytes are correct but were loaded incorrectly"
        )
        raise OfferRefused(f"probe: after loading, {difference}, {tolerance}")
    return float(_differences(probe, actual).max(initial=0.0))


def _describe_inexact(probe: wire.Probe, logprobs: npt.NDArray[np.float32], worst: int) -> str:
    """Return why a server may compute other bits than the learner."""
    difference = float(_differences(probe, logprobs)[worst])
    number = f"the logprob of token {worst + 1} differs by {difference:.3g} from the learner's"
    return (
        f"probe: {number}, and rollout.exact allows no difference: give both the same kind of "
        "processor, as many threads, and the same torch and transformers"
    )


def wrong_token(probe: wire.Probe, logprobs: npt.ArrayLike) -> int | None:
    """Return the index of the logprob that differs most, if the logprobs are not those of the
    offered weights.

    More than a tenth of them beyond the tolerance, or one beyond eight times the tolerance, are
    not.

    Args:
        logprobs: shape (n - 1,), as in the probe.
    """
    differences = _differences(probe, logprobs)
    beyond = int((differences > probe.tolerance).sum())
    if (
        beyond <= _FLIPPED * len(differences)
        and not (differences > _OUTLIER * probe.tolerance).any()
    ):
        return None
    return int(differences.argmax())


def _differences(probe: wire.Probe, logprobs: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Return the absolute differences, infinite where a logprob is NaN."""
    differences = np.abs(np.asarray(logprobs, dtype=np.float64) - probe.logprobs.array())
    return np.where(np.isnan(differences), np.inf, differences)
