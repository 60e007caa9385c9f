"""What the predicted length of a request says about the output that is still to come, once a part
of it is there.

A prediction is two numbers of tokens, ``expected_tokens`` (the median) and ``expected_high`` (the
0.9 quantile) of ``broker.contract.wire.GenerateRequest``. They are read as a lognormal
distribution, cut at the request's limit: lengths of answers are skewed, and an answer that has
outgrown its prediction has, on average, the more still to come.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Final

HIGH: Final = 0.9  # the quantile that ``expected_high`` is
# of log lengths: predictions are never surer than this about what outgrew them
LEAST_SPREAD: Final = 0.25
_NORMAL: Final = NormalDist()
_Z_HIGH: Final = _NORMAL.inv_cdf(HIGH)
# standard deviations from which on the tail's asymptote is exact enough, and the tail underflows
_FAR: Final = 6.0


def remaining_tokens(expected: int, high: int, generated: int, limit: int) -> tuple[int, int]:
    """Return median and 0.9 quantile of the tokens that follow the first ``generated`` ones, about
    1 microsecond.

    Args:
        expected: predicted median of the whole output's length, 0 unknown.
        high: predicted 0.9 quantile of it, 0 unknown.
        generated: tokens of the output that are there.
        limit: most tokens that can follow.

    Returns:
        Two numbers from 1 to ``limit``, the second not below the first; (0, 0) if ``expected`` is 0
        or nothing can follow.
    """
    if expected <= 0 or limit <= 0:
        return 0, 0
    if generated <= 0:
        return min(expected, limit), min(max(high, expected), limit)
    spread = max(math.log(max(high, expected) / expected) / _Z_HIGH, LEAST_SPREAD)
    z = math.log(generated / expected) / spread
    middle, top = (
        math.exp(spread * growth)
        for growth in (_further_growth(z, 0.5), _further_growth(z, 1 - HIGH))
    )
    least = min(max(round(generated * (middle - 1)), 1), limit)
    return least, min(max(round(generated * (top - 1)), least), limit)


def _further_growth(z: float, share: float) -> float:
    """Return by how many standard deviations those grow further that ``share`` of all beyond ``z``
    outlive.
    """
    if z > _FAR:
        return -math.log(share) / z
    return -_NORMAL.inv_cdf(share * _NORMAL.cdf(-z)) - z
