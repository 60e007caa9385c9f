"""The last check of new weights, by logprobs of fixed tokens: correct bytes may still be loaded incorrectly."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from broker.contract import wire
from broker.errors import OfferRefused


def make_probe(token_ids: Sequence[int], logprobs: npt.ArrayLike, *, tolerance: float) -> wire.Probe:
    """Return the probe for an offer.

    Args:
        token_ids: n fixed tokens, n >= 2.
        logprobs: shape (n - 1,): log p(token[i + 1] | token[: i + 1]) under the offered weights, temperature 1.
        tolerance: largest absolute difference that a correct server may show.
    """
    values = np.asarray(logprobs, dtype="<f4").reshape(-1)
    if len(token_ids) < 2 or len(values) != len(token_ids) - 1:
        raise ValueError(f"{len(token_ids)} probe tokens need {len(token_ids) - 1} logprobs, got {len(values)}")
    return wire.Probe(token_ids=wire.column(token_ids, "<i4"), logprobs=wire.column(values, "<f4"), tolerance=tolerance)


def check_probe(probe: wire.Probe, logprobs: npt.ArrayLike) -> float:
    """Compare the loaded weights' logprobs with the offer's; return the largest absolute difference.

    Args:
        logprobs: shape (n - 1,), computed by the server after loading, at temperature 1.

    Raises:
        OfferRefused: if a difference is above the tolerance or NaN, or the number of values differs.
    """
    expected = probe.logprobs.array()
    actual = np.asarray(logprobs, dtype=np.float32).reshape(-1)
    if actual.shape != expected.shape:
        raise OfferRefused(f"probe: {len(actual)} logprobs for {len(expected)} expected")
    difference = np.abs(actual.astype(np.float64) - expected)
    worst = int(np.argmax(np.where(np.isnan(difference), np.inf, difference))) if len(difference) else 0
    largest = float(difference[worst]) if len(difference) else 0.0
    if not largest <= probe.tolerance:
        found = f"token {worst + 1} has logprob {actual[worst]:.6f}, the learner's is {expected[worst]:.6f}"
        why = f"tolerance {probe.tolerance:g}; the bytes are correct but were loaded incorrectly"
        raise OfferRefused(f"probe: after loading, {found}, {why}")
    return largest
