"""Direct preference optimization. Rafailov et al. (arXiv 2305.18290).

Label smoothing: Mitchell, "A note on DPO with noisy preferences" (2023), conservative DPO.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from learner.algorithm.losses.preference import PairLogprobs
from learner.algorithm.traits import PreferenceTraits, declares


@declares(PreferenceTraits(label_smoothing=True))
def dpo(pairs: PairLogprobs, beta: float, *, label_smoothing: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return ``-(1 - s) log sigmoid(m) - s log sigmoid(-m)``, s the label smoothing.

    The margin m is ``beta ((log p_w - log p_l) - (log ref_w - log ref_l))``, equation 7 of the
    paper; w is the chosen answer, l the rejected one. With s above 0 the loss is least at ``m =
    log((1 - s) / s)`` instead of at infinity.

    Args:
        label_smoothing: share of pairs that are labelled the wrong way round, below 1/2.

    Returns:
        Losses (P,) and margins (P,): the sigmoid's argument, the difference of implicit rewards.
    """
    margins = beta * ((pairs.chosen - pairs.rejected) - (pairs.ref_chosen - pairs.ref_rejected))
    losses = -functional.logsigmoid(margins)
    if label_smoothing:
        flipped = -functional.logsigmoid(-margins)
        losses = (1.0 - label_smoothing) * losses + label_smoothing * flipped
    return losses, margins
