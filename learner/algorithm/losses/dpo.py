"""Direct preference optimization. Rafailov et al. (arXiv 2305.18290)."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from learner.algorithm.losses.preference import PairLogprobs


def dpo(pairs: PairLogprobs, beta: float) -> tuple[Tensor, Tensor]:
    """Return ``-log sigmoid(beta ((log p_w - log p_l) - (log ref_w - log ref_l)))``.

    Equation 7 of the paper; w is the chosen answer, l the rejected one.

    Returns:
        Losses (P,) and margins (P,): the sigmoid's argument, the difference of implicit rewards.
    """
    margins = beta * ((pairs.chosen - pairs.rejected) - (pairs.ref_chosen - pairs.ref_rejected))
    return -functional.logsigmoid(margins), margins
