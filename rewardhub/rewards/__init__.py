"""Registry of rewards by name; the interface of their classes is in ``rewardhub.rewards.base``.

A user's own function needs no entry: its dotted path or file path is its name.
"""

from __future__ import annotations

from typing import Final

REWARDS: Final[dict[str, str]] = {
    "math_answer": "rewardhub.rewards.math_answer:MathAnswerReward",
    "reward_model": "rewardhub.rewards.reward_model:RewardModel",
    "instruction_following": ("rewardhub.rewards.instruction_following:InstructionFollowingReward"),
    "verifier": "rewardhub.rewards.verifier:VerifierReward",
    "rubric": "rewardhub.rewards.judges.rubric:RubricReward",
    "code": "rewardhub.rewards.code:CodeReward",
    "format": "rewardhub.rewards.format:FormatReward",
    "judge": "rewardhub.rewards.judge:JudgeReward",
    "length": "rewardhub.rewards.length:LengthReward",
    "process_reward": "rewardhub.rewards.models.process_reward:ProcessReward",
    "implicit_reward": "rewardhub.rewards.models.implicit_reward:ImplicitReward",
}
