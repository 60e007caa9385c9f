"""Scores responses with a Hugging Face sequence classifier, or a language model with a value head.

    rewards: [{name: reward_model, args: {path: Skywork/Skywork-Reward-V2-Qwen3-0.6B, scale: 0.1}}]

The model's chat template gets the question as the user's message and the response as the
assistant's. Samples that arrive while a batch is computed form the next one. ``rewardhub --gpus
0-1`` gives each process a GPU.
"""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Any, ClassVar

from rewardhub.rewards.base import NoScore, Sample, Scored
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
        self._waiting: list[tuple[list[int], asyncio.Future[float]]] = []
        self._working: asyncio.Task[None] | None = None

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
        """
        ids, truncated = self._model.tokens(sample.prompt, sample.response)
        future: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._waiting.append((ids, future))
        if self._working is None:
            self._working = asyncio.create_task(self._work())
        output = await future
        if not math.isfinite(output):
            raise NoScore(
                f"domain {sample.domain!r}, task {sample.task_index}: the model's output is "
                f"{output}"
            )
        value = self._args.scale * output + self._args.offset
        if self._args.clip is not None:
            value = min(max(value, self._args.clip[0]), self._args.clip[1])
        return Scored(value, {"truncated": float(truncated)})

    async def _work(self) -> None:
        """Compute batches in a thread until no sample waits."""
        try:
            while self._waiting:
                batch = [
                    entry for entry in self._waiting[: self._args.batch_size] if not entry[1].done()
                ]
                del self._waiting[: self._args.batch_size]
                await self._batch(batch)
        finally:
            self._working = None

    async def _batch(self, batch: list[tuple[list[int], asyncio.Future[float]]]) -> None:
        if not batch:
            return
        try:
            outputs: list[Any] = list(
                await asyncio.to_thread(self._model.outputs, [ids for ids, _ in batch])
            )
        except Exception as error:  # noqa: BLE001 - an error of torch fails the waiting samples
            outputs = [error] * len(batch)
        for (_, future), output in zip(batch, outputs, strict=True):
            if future.done():
                continue
            if isinstance(output, Exception):
                future.set_exception(RuntimeError(f"{type(output).__name__}: {output}"))
            else:
                future.set_result(output)
