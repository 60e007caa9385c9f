"""Scores responses with a Hugging Face sequence classifier, or a language model with a value head.

    rewards: [{name: reward_model, args: {path: Skywork/Skywork-Reward-V2-Qwen3-0.6B, scale: 0.1}}]

The model's chat template gets the question as the user's message and the response as the
assistant's. Samples that arrive while a batch is computed form the next one. ``rewardhub --gpus
0-1`` gives each process a GPU. ``rlearner rm`` trains such a model.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

from rewardhub.rewards.base import NoScore, Sample, Scored
from rewardhub.rewards.models.batching import BatchQueue
from rewardhub.rewards.reward_model_args import RewardModelArgs

if TYPE_CHECKING:
    from rewardhub.rewards.scoring_model import ScoringModel


class RewardModel:
    """Reward: the model's output for question and response. Note ``truncated``: it did not fit."""

    Args = RewardModelArgs
    concurrent: ClassVar[bool] = True
    on_gpu: ClassVar[bool] = True

    def __init__(self, args: RewardModelArgs) -> None:
        self._args = args
        self._model = self._open(args)
        self._queue: BatchQueue[list[int], float] = BatchQueue(self._model.outputs, args.batch_size)

    @classmethod
    def check(cls, args: RewardModelArgs) -> None:
        """Check that a local folder holds a model; a model of the hub is checked when loaded."""
        from rlearner_text.hub import check_model, check_trust, is_local

        check_trust(args.path, "path", trust_remote_code=args.trust_remote_code)
        if is_local(args.path):
            check_model(args.path, "path")

    @staticmethod
    def _open(args: RewardModelArgs) -> ScoringModel:
        from rewardhub.rewards.scoring_model import ScoringModel

        return ScoringModel(args)

    async def score(self, sample: Sample) -> Scored:
        """Return the reward of one response.

        Raises:
            NoScore: if the model's output is not finite.
            RuntimeError: if the model fails.
        """
        ids, truncated = self._model.tokens(sample.prompt, sample.response)
        output = await self._queue.compute(ids)
        if not math.isfinite(output):
            raise NoScore(
                f"domain {sample.domain!r}, task {sample.task_index}: the model's output is "
                f"{output}"
            )
        value = self._args.scale * output + self._args.offset
        if self._args.clip is not None:
            value = min(max(value, self._args.clip[0]), self._args.clip[1])
        return Scored(value, {"truncated": float(truncated)})
