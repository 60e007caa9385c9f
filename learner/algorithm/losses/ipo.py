"""Identity preference optimization. Azar et al. (arXiv 2310.12036)."""

from __future__ import annotations

import torch
from torch import Tensor

from learner.algorithm.losses.preference import PairLogprobs


def ipo(pairs: PairLogprobs, beta: float) -> tuple[Tensor, Tensor]:
    """Return ``(h - 1 / (2 beta))^2``, equation 17 of the paper.

    h is the difference of the log-ratios to the reference, averaged over tokens. The paper writes
    sums, and its tau is beta here. Averages keep the target reachable by answers of any length; its
    authors have confirmed to other implementations that their results use them.

    Returns:
        Losses (P,) and margins (P,): ``beta h``, which the loss pulls to 1/2.
    """
    chosen_ratio = (pairs.chosen - pairs.ref_chosen) / pairs.chosen_tokens
    rejected_ratio = (pairs.rejected - pairs.ref_rejected) / pairs.rejected_tokens
    h = chosen_ratio - rejected_ratio
    return torch.square(h - 1 / (2 * beta)), beta * h
