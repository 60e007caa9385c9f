"""The Bradley-Terry loss of reward models. Bradley and Terry (1952); Ouyang et al. (2203.02155)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def bradley_terry(scores: Tensor, center: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return ``-log sigmoid(r_w - r_l) + center (r_w + r_l)^2``.

    w is the chosen answer, l the rejected one. The first term leaves an offset open that both
    scores of a pair have in common; the second draws it to 0 (Eisenstein et al., arXiv 2312.09244).

    Args:
        scores: (P, 2), of the chosen and the rejected answer.
        center: weight of the second term.

    Returns:
        Losses (P,) and margins ``r_w - r_l`` (P,).
    """
    chosen, rejected = scores.unbind(1)
    margins = chosen - rejected
    return -functional.logsigmoid(margins) + center * torch.square(chosen + rejected), margins
