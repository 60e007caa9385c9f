"""Registry of rewards by name; the interface of their classes is in ``rewardhub.rewards.base``.

A user's own function needs no entry: its dotted path or file path is its name.
"""

from __future__ import annotations

from typing import Final

REWARDS: Final[dict[str, str]] = {
    "math_answer": "rewardhub.rewards.math_answer:MathAnswer",
    "reward_model": "rewardhub.rewards.reward_model:RewardModel",
    "code": "rewardhub.rewards.code:Code",
    "format": "rewardhub.rewards.format:Format",
    "judge": "rewardhub.rewards.judge:Judge",
    "length": "rewardhub.rewards.length:Length",
}
