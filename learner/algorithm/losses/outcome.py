"""Cross entropy of an implicit process reward model on outcomes.

Yuan et al. (arXiv 2412.01981), the loss named CE; Cui et al., PRIME (arXiv 2502.01456).
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from learner.algorithm.losses.preference import PairLogprobs


def outcome(pairs: PairLogprobs, beta: float) -> tuple[Tensor, Tensor]:
    """Return ``-(log sigmoid(r_w) + log sigmoid(-r_l)) / 2`` with ``r = beta (log p - log ref)``.

    The chosen answer w is one that solved the task, the rejected one l failed. Unlike DPO's loss
    it judges each answer by itself, so r is a log-odds of success, and its share of each token a
    process reward.

    Returns:
        Losses (P,) and margins ``r_w - r_l`` (P,).
    """
    chosen = beta * (pairs.chosen - pairs.ref_chosen)
    rejected = beta * (pairs.rejected - pairs.ref_rejected)
    losses = -(functional.logsigmoid(chosen) + functional.logsigmoid(-rejected)) / 2
    return losses, chosen - rejected
