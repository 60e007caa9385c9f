"""The learner's sections: train, algorithm, warm_start, eval, checkpoint, trackers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from broker.config import Section


class TrainSection(Section):
    """How many steps, how large, how stale."""

    steps: PositiveInt = 100
    groups_per_step: PositiveInt = 16
    max_staleness: NonNegativeInt = 1  # versions a trained token may lag behind
    on_late: Literal["drop", "wait"] = "wait"
    backend: str = "torch"  # a name of the registry in learner/backends
    device: str = "auto"  # auto, cpu, cuda, cuda:1
    lr: PositiveFloat = 1e-6
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: NonNegativeInt = 0
    weight_decay: NonNegativeFloat = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    max_grad_norm: NonNegativeFloat = 1.0  # 0 is off
    micro_batch_tokens: PositiveInt = 8192  # padded tokens of one forward pass
    num_threads: NonNegativeInt = 0  # torch threads, 0 leaves the default
    ticket_timeout_s: PositiveFloat = 1800.0  # the learner closes a ticket that nobody ended
    weights_bucket_mib: PositiveFloat = 32.0
    weights_timeout_s: PositiveFloat = 30.0  # longest wait for one bucket


class AlgorithmSection(Section):
    """What the gradient is."""

    adv_estimator: str = "grpo"  # a name of the registry in learner/advantages
    norm_std: bool = True  # divide by the group's standard deviation
    pg_variant: str = "ppo"  # a name of the registry in learner/losses
    clip_low: Annotated[float, Field(ge=0, le=1)] = 0.2
    clip_high: Annotated[float, Field(ge=0)] = 0.2
    dual_clip: PositiveFloat | None = None
    loss_agg_mode: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"] = "token-mean"
    kl_coef: NonNegativeFloat = 0.0  # 0: no reference model is loaded
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    entropy_coef: NonNegativeFloat = 0.0
    filter_zero_variance: bool = False  # dynamic sampling: such groups are filtered and replaced
    max_replacements_per_step: NonNegativeInt = 64  # at this bound what there is gets trained


class WarmStartSection(Section):
    """Supervised steps before the first version, for models made here."""

    steps: NonNegativeInt = 0  # 0: none
    domain: str = ""  # whose demonstrations; empty: the only domain
    episodes: PositiveInt = 512  # demonstrations written by ``envhub demos``
    noise: Annotated[float, Field(ge=0, le=1)] = 0.5  # share of random moves in them
    data: str | None = None  # a JSONL of conversations in place of demonstrations
    batch_size: PositiveInt = 32
    lr: PositiveFloat = 1e-3


class EvalSection(Section):
    """Held-out tasks, measured without stopping training."""

    every_steps: NonNegativeInt = 0  # 0: never
    tasks: PositiveInt = 256  # per domain
    group_size: PositiveInt = 1  # episodes per task
    temperature: NonNegativeFloat = 1.0
    at_start: bool = True
    baseline: str = ""  # policy measured once beside the actor, for example ``random``; empty: none
    timeout_s: PositiveFloat = 600.0  # the run waits this long for its last evaluation


class CheckpointSection(Section):
    """What is left on disk."""

    every_steps: NonNegativeInt = 0  # 0: only at the end
    keep: Annotated[int, Field(ge=2)] = 2


class TrackersSection(Section):
    """Where metrics go beside metrics.jsonl."""

    use: list[str] = ["tensorboard"]  # names of the registry in learner/trackers
    project: str = "rlearner"
    args: dict[str, Any] = {}
