"""The section ``algorithm``."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from broker.settings.config import Section
from broker.settings.schema.teaching import DistillationSection

Share = Annotated[float, Field(ge=0, le=1)]
AggregationMode = Literal[
    "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
]
# Losses whose papers average over a sequence's tokens, then over sequences: Zheng et al. (arXiv
# 2507.18071), Gao et al. (arXiv 2511.20347), Zhao et al. (arXiv 2507.20673).
_SEQUENCE_LOSSES: Final = ("gspo", "sapo", "gmpo")


class RewardNormalization(Section):
    """Normalization of rewards before the estimator; off if both types are null."""

    # same ticket, first anchor, domain; all
    grouping: Literal["traj_group_id", "state", "inductive", "batch"] = "traj_group_id"
    norm_mean_type: Literal["group", "batch"] | None = None  # which mean is subtracted
    norm_std_type: Literal["group", "batch"] | None = None  # which standard deviation divides


class CriticSection(Section):
    """Value model of the policy's architecture, trained with it."""

    # train a value model, which adv_estimator gae needs
    enabled: bool = False
    # learning rate of the critic
    lr: PositiveFloat = 1e-5
    # of the critic
    weight_decay: NonNegativeFloat = 0.0
    max_grad_norm: NonNegativeFloat = 1.0  # 0 is off
    # values move at most this far from those at the step's start; null: no limit
    clip: PositiveFloat | None = 0.2
    warmup_steps: NonNegativeInt = 0  # steps that train only the critic


class RejectionSection(Section):
    """A criterion of correction ``composed``: what it does not accept is not trained on."""

    # of the value that is bounded: a token's, or its sequence's sum, mean or largest one
    level: Literal["token", "sequence", "geometric", "max"] = "geometric"
    estimator: Literal["k1", "k2", "k3"] = "k1"  # k1 bounds the ratio, k2 and k3 the divergence
    low: PositiveFloat | None = None  # k1: least ratio; null: no bound
    high: PositiveFloat = 2.0  # k1: largest ratio; k2, k3: largest divergence, in nats


class AlgorithmSection(Section):
    """Options of the gradient: advantages, loss, corrections, KL, filters."""

    adv_estimator: str = "grpo"  # a name of the registry in learner/algorithm/advantages
    norm_std: bool = True  # divide by the group's standard deviation
    # in environments with seats, what a seat's rewards are compared with: those of the same seat in
    # the group's other episodes, or those of all seats
    seat_baseline: Literal["own", "shared"] = "own"
    # discount: per sampled token or per turn, as ``discount`` says; in gigpo per turn
    gamma: Annotated[float, Field(ge=0, le=1)] = 1.0
    # what gamma discounts for: each sampled token, or each turn
    discount: Literal["token", "turn"] = "token"
    # gae: weight of later errors of the critic
    gae_lambda: Annotated[float, Field(ge=0, le=1)] = 1.0
    # gigpo: weight of the step's advantage relative to the episode's
    step_advantage_w: NonNegativeFloat = 1.0
    # gigpo: least similarity of observations of one state
    anchor_similarity: Annotated[float, Field(gt=0, le=1)] = 1.0
    # weight of each reward by its name in reward_parts; others are left out; null: 1 for each
    gdpo_weights: dict[str, float] | None = None
    # grpo_passk: tries of which the best counts; null: the whole group
    pass_k: Annotated[int, Field(ge=2)] | None = None
    reward_normalization: RewardNormalization = RewardNormalization()
    reward_clip: PositiveFloat | None = None  # clips rewards to [-x, x], after normalization
    format_penalty: NonNegativeFloat = 0.0  # subtracted for each turn that parsed to no action
    # tokens before overlong_length over which the penalty grows; 0 is off
    overlong_buffer: NonNegativeInt = 0
    # sampled tokens of a trajectory at which the penalty is full
    overlong_length: PositiveInt | None = None
    # the full penalty
    overlong_factor: PositiveFloat = 1.0
    # truncated samples count in their group's mean, but are not trained on
    mask_truncated: bool = False
    whiten_advantages: bool = False  # over the trained tokens of the step
    advantage_clip: PositiveFloat | None = None  # clips advantages to [-x, x], after whitening
    # starpo_s: groups of a step that are trained on
    keep_fraction: Annotated[float, Field(gt=0, le=1)] = 0.25
    pg_variant: str = "ppo"  # a name of the registry in learner/algorithm/losses
    # the ratio is clipped below 1 minus this; gmpo: its log below minus this; dppo: divergence
    # beyond which less likely tokens are masked
    clip_low: Annotated[float, Field(ge=0, le=1)] = 0.2
    # the ratio is clipped above 1 plus this; gmpo: its log above this; dppo: divergence beyond
    # which likelier tokens are masked
    clip_high: Annotated[float, Field(ge=0)] = 0.2
    # ppo: for negative advantages the loss is at most this times -A; null: no bound
    dual_clip: PositiveFloat | None = None
    ratio_cap: PositiveFloat = 20.0  # dppo: the ratio is truncated above this
    sapo_tau_pos: PositiveFloat = 1.0  # sapo: temperature of the gate for advantages above 0
    sapo_tau_neg: PositiveFloat = 1.05  # sapo: temperature of the gate for all others
    # clip_cov, kl_cov: share of a step's tokens that is selected by covariance, at least one token
    cov_share: Annotated[float, Field(gt=0, le=1)] = 0.0002
    cov_low: float = 1.0  # clip_cov: least covariance of the selected tokens
    cov_high: float = 5.0  # clip_cov: largest covariance of the selected tokens
    kl_cov_coef: NonNegativeFloat = 1.0  # kl_cov: weight of the penalty on the selected tokens
    # weight of the cross-entropy of what the environment says between turns (ECHO); 0: off
    echo_coef: NonNegativeFloat = 0.0
    # topr: level of the tapered ratio
    importance_sampling_level: Literal["sequence", "token"] = "sequence"
    correction: str = "none"  # a name of the registry in learner/algorithm/corrections
    # level of the bounded ratio; none: composed does not weigh
    correction_level: Literal["token", "sequence", "geometric", "none"] = "token"
    correction_low: NonNegativeFloat = 0.5  # icepop, mis: ratios below are masked
    # ratios above are truncated (tis, composed, decoupled) or masked (icepop, mis)
    correction_high: PositiveFloat = 2.0
    # decoupled: applied to ratios above correction_high
    correction_mode: Literal["truncate", "mask"] = "truncate"
    # mis: level of the mask; null: correction_level
    mis_mask_level: Literal["token", "sequence", "geometric"] | None = None
    # k1 bounds the ratio, k2 and k3 the divergence by correction_high
    mis_estimator: Literal["k1", "k2", "k3"] = "k1"
    # nats per token; bad sequences further than this from the policy are masked
    opsm_delta: NonNegativeFloat = 1e-4
    # kpop: nats; tokens whose binary divergence exceeds this in either direction are masked
    kpop_phi: PositiveFloat = 0.5
    # composed: all of them must accept a token
    rejections: list[RejectionSection] = Field(default_factory=list)
    # corrections use the ratio of the current policy, losses that of the sampling one; no samples
    # are scored before the step
    bypass: bool = False
    # source of the logprobs at the step's start
    prox_logp_method: Literal["recompute", "interpolate"] = "recompute"
    num_epochs: PositiveInt = 1  # passes over a step's samples
    num_minibatches: PositiveInt = 1  # updates of one pass
    # makes minibatches equally large; null: they need not be
    batch_adjust: Literal["copy", "delete", "auto", "random_sample"] | None = None
    # pg_variant gspo, sapo, gmpo: seq-mean-token-mean
    loss_agg_mode: AggregationMode = "token-mean"
    kl_coef: NonNegativeFloat = 0.0  # 0: no reference model is loaded
    # of the divergence from the reference model; with +: the gradient of k2
    kl_estimator: Literal["k1", "k2", "k3", "k1+", "k3+"] = "k3"
    # k1, k3 in the loss: weigh the divergence by the ratio to the sampling policy
    kl_importance: bool = False
    # whether the divergence is added to the loss or subtracted from rewards
    kl_placement: Literal["loss", "reward"] = "loss"
    # nats per token; the coefficient starts at kl_coef and adapts to it
    kl_target: PositiveFloat | None = None
    kl_horizon: PositiveFloat = 10000.0  # sequences over which it adapts
    # weight of the entropy, which the loss then raises
    entropy_coef: NonNegativeFloat = 0.0
    critic: CriticSection = CriticSection()
    distillation: DistillationSection = DistillationSection()
    filter_zero_variance: bool = False  # dynamic sampling: such groups are filtered and replaced
    # a filter of learner/algorithm/filters, or your function: rejected groups are replaced
    group_filter: str = ""
    # least and largest share of successes: other groups are filtered and replaced; null: off
    pass_rate: Annotated[list[Share], Field(min_length=2, max_length=2)] | None = None
    close_early: bool = False  # hubs end a group as soon as pass_rate is certain to filter it
    # beyond this bound groups are trained unfiltered
    max_replacements_per_step: NonNegativeInt = 64

    @model_validator(mode="before")
    @classmethod
    def _aggregate_as_the_loss_does(cls, values: Any) -> Any:
        """Average as the loss's paper does unless the mode is set."""
        if isinstance(values, dict) and values.get("pg_variant") in _SEQUENCE_LOSSES:
            return {"loss_agg_mode": "seq-mean-token-mean"} | values
        return values


def num_updates(algorithm: AlgorithmSection) -> int:
    """Return the number of optimizer updates per step."""
    return algorithm.num_epochs * algorithm.num_minibatches


def kl_in_reward(algorithm: AlgorithmSection) -> bool:
    """Return whether rewards depend on the divergence from the reference."""
    return algorithm.kl_coef > 0 and algorithm.kl_placement == "reward"
