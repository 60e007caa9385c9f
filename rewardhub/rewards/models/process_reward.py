"""Scores the steps of responses with a process reward model of Hugging Face.

    rewards: [{name: process_reward, args: {path: Qwen/Qwen2.5-Math-PRM-7B, aggregate: min}}]

A response is divided into steps by ``split``. The model reads each step with ``separator`` behind
it, and says there with which probability it is right. ``aggregate`` makes one score of a turn's, or
an episode's, steps: their min, product or mean, or the last of them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

from rewardhub.rewards.base import NoScore, Sample, Scored, Value
from rewardhub.rewards.models.batching import BatchQueue
from rewardhub.rewards.models.process_args import ModelArgs, ProcessRewardArgs
from rewardhub.rewards.models.step_scores import NOTHING, combine_steps

if TYPE_CHECKING:
    from rewardhub.rewards.models.step_model import StepModel
    from rewardhub.rewards.models.step_tokens import StepTokens


class ProcessReward:
    """Reward: the probability that steps are right, for each turn or for the episode.

    A turn without a step, and steps beyond ``max_length``, count as wrong. Notes: ``steps``,
    ``lowest`` (the lowest score of a step) and ``truncated``.
    """

    Args = ProcessRewardArgs
    concurrent: ClassVar[bool] = True
    on_gpu: ClassVar[bool] = True

    def __init__(self, args: ProcessRewardArgs) -> None:
        from rewardhub.rewards.models.step_model import StepModel

        self._args = args
        self._model: StepModel = StepModel(args)
        self._queue: BatchQueue[StepTokens, list[float]] = BatchQueue(
            self._model.outputs, args.batch_size
        )

    @classmethod
    def check(cls, args: ProcessRewardArgs) -> None:
        """Check that a local folder holds a model; a model of the hub is checked when loaded."""
        check_local(args.path, "path")

    async def score(self, sample: Sample) -> Scored:
        """Return one score for each turn, or one for the episode.

        Raises:
            NoScore: if the model's output is not finite, or the episode cannot be shown to it.
            RuntimeError: if the model fails.
        """
        tokens = self._model.encode(sample)
        scores = await self._queue.compute(tokens)
        if not all(map(math.isfinite, scores)):
            raise NoScore(
                f"domain {sample.domain!r}, task {sample.task_index}: the model's output is not "
                "finite"
            )
        turns = tokens.divide(scores, NOTHING)
        per_turn = self._args.credit == "turn"
        combined = combine_steps(turns, self._args.aggregate, per_turn=per_turn)
        notes = {
            "steps": float(sum(tokens.num_steps)),
            "lowest": min((score for steps in turns for score in steps), default=NOTHING),
            "truncated": float(tokens.is_truncated),
        }
        return Scored(scale_scores(combined, self._args), notes)


def scale_scores(scores: list[float], args: ModelArgs) -> Value:
    """Return the scores, scaled: a list for credit by turns, else the only one."""
    scaled = [args.scale * score + args.offset for score in scores]
    if args.credit == "turn":
        return scaled
    return scaled[0]


def check_local(path: str, key: str) -> None:
    """Check that a local folder holds a model; a hub name is checked when it is loaded.

    Raises:
        ConfigError: if it holds none.
    """
    from rlearner_text.hub import check_model, is_local

    if is_local(path):
        check_model(path, key)
