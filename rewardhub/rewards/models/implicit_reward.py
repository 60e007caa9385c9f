"""Scores tokens with an implicit process reward model: the log-ratio of two language models.

    rewards: [{name: implicit_reward, args: {path: FOLDER, reference: MODEL, beta: 0.05}}]

``rlearner dpo`` with ``dpo.loss: outcome`` trains such a model on answers that solved a task and
answers that failed; its reference is ``reference``. The reward of a token is ``beta (log p - log
ref)``, as in Cui et al., PRIME (arXiv 2502.01456), and that of a turn the sum over its tokens.
PRIME also updates the model while the policy learns; here it stays as it was trained.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

from rewardhub.rewards.base import NoScore, Sample, Scored
from rewardhub.rewards.models.batching import BatchQueue
from rewardhub.rewards.models.process_args import ImplicitRewardArgs
from rewardhub.rewards.models.process_reward import check_local, scale_scores

if TYPE_CHECKING:
    from rewardhub.rewards.models.implicit_model import ImplicitModel
    from rewardhub.rewards.models.turn_tokens import TurnTokens


class ImplicitReward:
    """Reward: sum or mean of the token rewards of each turn, or of the episode.

    Notes: ``tokens`` (scored) and ``truncated`` (whether some did not fit).
    """

    Args = ImplicitRewardArgs
    concurrent: ClassVar[bool] = True
    on_gpu: ClassVar[bool] = True

    def __init__(self, args: ImplicitRewardArgs) -> None:
        from rewardhub.rewards.models.implicit_model import ImplicitModel

        self._args = args
        self._model: ImplicitModel = ImplicitModel(args)
        self._queue: BatchQueue[TurnTokens, list[list[float]]] = BatchQueue(
            self._model.outputs, args.batch_size
        )

    @classmethod
    def check(cls, args: ImplicitRewardArgs) -> None:
        """Check that local folders hold models; models of the hub are checked when loaded."""
        check_local(args.path, "path")
        check_local(args.reference, "reference")

    async def token_rewards(self, sample: Sample) -> list[list[float]]:
        """Return the reward of each token of each turn.

        Raises:
            NoScore: if the episode cannot be shown to the model.
            RuntimeError: if the model fails.
        """
        return await self._queue.compute(self._model.encode(sample))

    async def score(self, sample: Sample) -> Scored:
        """Return one score for each turn, or one for the episode.

        Raises:
            NoScore: if a token's reward is not finite, or the episode cannot be shown to the model.
            RuntimeError: if the model fails.
        """
        tokens = self._model.encode(sample)
        turns = await self._queue.compute(tokens)
        num_scored = sum(map(len, turns))
        groups = turns
        if self._args.credit == "episode":
            groups = [[reward for turn in turns for reward in turn]]
        sums = [math.fsum(group) for group in groups]
        if not all(map(math.isfinite, sums)):
            raise NoScore(
                f"domain {sample.domain!r}, task {sample.task_index}: the reward of a token is not "
                "finite"
            )
        if self._args.aggregate == "mean":
            sums = [total / max(len(group), 1) for total, group in zip(sums, groups, strict=True)]
        num_tokens = sum(end - start for start, end in tokens.spans)
        notes = {"tokens": float(num_scored), "truncated": float(num_scored < num_tokens)}
        return Scored(scale_scores(sums, self._args), notes)
