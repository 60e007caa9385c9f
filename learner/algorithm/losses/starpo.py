"""StarPO: the clipped surrogate over whole trajectories of many turns. Wang et al., RAGEN (arXiv 2504.20073).

A trajectory is one sequence here, with masked observations, so the loss is PPO's. StarPO-S prevents collapse: it
selects groups by their variance (``learner.algorithm.selection``), without KL, and with a larger upper clip.
"""

from __future__ import annotations

from typing import Final

from learner.algorithm.losses.base import PolicyLoss
from learner.algorithm.losses.ppo import ppo

starpo: Final[PolicyLoss] = ppo
starpo_s: Final[PolicyLoss] = ppo
