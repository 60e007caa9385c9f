"""StarPO: the clipped surrogate over whole trajectories of many turns.

Wang et al., RAGEN (arXiv 2504.20073).

A trajectory is one sequence here, with masked observations, so the loss is PPO's. StarPO-S prevents
collapse: it selects groups by their variance (``learner.algorithm.selection``), without KL, and
with a larger upper clip.
"""

from __future__ import annotations

from typing import Final

from torch import Tensor

from learner.algorithm.losses.base import LossTokens, PolicyLoss
from learner.algorithm.losses.ppo import ppo
from learner.algorithm.traits import LossTraits, declares
from learner.config import AlgorithmSection

starpo: Final[PolicyLoss] = ppo


@declares(LossTraits(dual_clip=True, kl=False))
def starpo_s(tokens: LossTokens, algorithm: AlgorithmSection) -> tuple[Tensor, dict[str, Tensor]]:
    """Return PPO's loss; the groups are selected before."""
    return ppo(tokens, algorithm)
