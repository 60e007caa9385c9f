"""The sections ``teachers`` and ``algorithm.distillation``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat

from broker.settings.config import ModelPath, PluginMark, Section, Token


class TeacherSection(Section):
    """A policy on rollout servers of its own that scores what the trained policy samples."""

    harmless = ("policy", "top_k", "hint", "tokenizer", "dtype")

    # policy of the servers that score: their `rollout-server --policy`; null: the teacher's name.
    # actor: the trained policy is its own teacher, with a hint
    policy: Token | None = None
    # folder or hub name of the weights; null with policy actor
    model_path: ModelPath | None = None
    # of the servers that `rlearner up` starts, and of `rollout-server --policy`; null: as in
    # rollout
    engine: Annotated[str, PluginMark("engines", "rollout.engines:ENGINE_ARGS", "engine_args")] | (
        None
    ) = None
    # arguments of that engine, checked by its class
    engine_args: dict[str, Any] = Field(default_factory=dict)
    dtype: Literal["float32", "bfloat16", "float16"] | None = None  # null: that of model.dtype
    # likeliest tokens of the teacher to compare at each position; 0: the sampled token alone
    top_k: NonNegativeInt = 0
    # appended to the prompt that the teacher reads, with {reference} for the task's reference
    # answer; empty: it reads the policy's prompt
    hint: str = ""
    # same: its vocabulary must be the policy's; aligned: it scores the text in tokens of its own,
    # spread over the policy's where both end at the same character
    tokenizer: Literal["same", "aligned"] = "same"


class DistillationSection(Section):
    """How a teacher's scores train the policy, in domains that name a teacher."""

    # advantage: the reverse divergence of each sampled token is added to its advantage; loss: the
    # divergence is added to its loss
    use: Literal["advantage", "loss"] = "advantage"
    # weight of the teacher; 0: its scores are recorded and not trained on
    coef: NonNegativeFloat = 1.0
    # factor of the advantages that come from rewards, in samples with a teacher; 0: only the
    # teacher trains
    reward_coef: NonNegativeFloat = 0.0
    # advantage: nats by which one token may differ, both ways; null: no limit
    clip: PositiveFloat | None = 5.0
    # loss, with top_k: reverse, KL(policy || teacher), or forward, KL(teacher || policy)
    kl: Literal["reverse", "forward"] = "reverse"
