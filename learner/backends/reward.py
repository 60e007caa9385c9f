"""Trains a reward model: the torch backend with a classifier instead of the language model."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from learner.algorithm.samples import TrainSample
from learner.backends.context import RunContext
from learner.backends.models.reward_model import RewardPolicy
from learner.backends.torch import BuildWorker, TorchBackend
from learner.backends.worker import build_worker


class RewardBackend(TorchBackend):
    """Scores and trains conversations, see ``learner.backends.models.reward_model``.

    Its logprobs are scores: ``pg_variant: sft`` minimises minus the weighted sum of them.
    """

    @classmethod
    def plan(cls, context: RunContext) -> tuple[RunContext, BuildWorker]:
        """See ``TorchBackend.plan``."""
        return context, partial(build_worker, kind=RewardPolicy)


def scored_sample(token_ids: Sequence[int]) -> TrainSample:
    """Return the sample by which a conversation is scored at its last token, with weight 1.

    Args:
        token_ids: of the conversation, at least one.
    """
    # What stands behind the end is neither read nor predicted.
    ids = np.array([*token_ids, token_ids[-1]], np.int32)
    mask = np.zeros(len(ids), np.uint8)
    mask[-1] = 1
    return TrainSample(
        ids,
        mask,
        np.zeros(len(ids), np.float32),
        versions=np.full(len(ids), -1, np.int32),
        advantages=mask.astype(np.float32),
        group=0,
        reward=0.0,
    )
