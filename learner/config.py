"""Defines the learner's config sections: train, algorithm, eval, checkpoint and others."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from broker.settings.config import Device, Section

Beta = Annotated[float, Field(ge=0, lt=1)]  # of Adam's averages
Share = Annotated[float, Field(ge=0, le=1)]
AggregationMode = Literal[
    "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
]


class LoraSection(Section):
    """Low-rank adapters on frozen weights, instead of training all weights."""

    rank: PositiveInt = 16
    alpha: PositiveInt = 32  # the adapters' output is scaled by alpha / rank
    # of the adapters' inputs, in training passes only
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    # names of linear layers and stacked experts, for example q_proj; all-linear: all of the
    # language model but the output layer and routers
    target_modules: Literal["all-linear"] | Annotated[list[str], Field(min_length=1)] = "all-linear"
    # to the servers: factors to merge there, or the merged model
    send: Literal["adapter", "merged"] = "adapter"


class DeepspeedSection(Section):
    """Options of train.backend deepspeed, by DeepSpeed's own names."""

    # what ranks shard: 1 the optimizer, 2 gradients too, 3 weights too
    stage: Annotated[int, Field(ge=1, le=3)] = 2
    # keep master weights and moments in host memory, and update them there
    offload_optimizer: bool = False
    offload_param: bool = False  # stage 3: keep each rank's shard of the weights in host memory
    reduce_bucket_size: PositiveInt = 50_000_000  # elements of the gradient reduced at once
    # stage 3: smaller weights are not sharded; elements
    param_persistence_threshold: NonNegativeInt = 100_000
    # stage 3: gathered weights kept for reuse at most; elements
    max_live_parameters: NonNegativeInt = 1_000_000_000


class MegatronSection(Section):
    """How train.backend megatron divides the model; the other ranks hold replicas."""

    # ranks per layer; must divide heads, key-value heads and MLP columns
    tensor_parallel: PositiveInt = 1
    pipeline_parallel: PositiveInt = 1  # pipeline stages; must divide the number of layers


class OptimizationSection(Section):
    """Options of training, shared by runs and offline training."""

    backend: str = "torch"  # a name of the registry in learner/backends
    device: Device = "auto"  # auto, cpu, cuda, cuda:1
    lr: PositiveFloat
    lr_schedule: Literal["constant", "linear", "cosine"]
    weight_decay: NonNegativeFloat = 0.0
    betas: tuple[Beta, Beta]
    max_grad_norm: NonNegativeFloat = 1.0  # 0 is off
    micro_batch_tokens: PositiveInt = 8192  # of one forward pass, padding included
    # sequences share a row; auto: if the model stays exact
    packing: Literal["auto", "packed", "padded"] = "auto"
    lora: LoraSection | None = None  # null: all weights are trained
    # recompute activations in the backward pass: less memory, a third more time
    gradient_checkpointing: bool = False
    # on a GPU: keep activations for the backward pass in host memory
    activation_offload: bool = False
    # keep master weights and moments in host memory, and update them there
    optimizer_offload: bool = False
    # torch.compile the blocks: faster passes on a GPU after a minute of compiling
    compile: bool = False
    num_threads: NonNegativeInt = 0  # torch threads, 0 leaves the default


class TrainSection(OptimizationSection):
    """Number, size and staleness of the steps, and how weights are sent."""

    steps: Annotated[PositiveInt, Field(le=2**31 - 1)] = 100  # a version's number has 31 bits
    groups_per_step: PositiveInt = 16
    max_staleness: NonNegativeInt = 1  # versions a trained token may lag behind
    on_late: Literal["drop", "wait"] = "wait"
    # whether a step starts before its last group is in
    streaming: Literal["auto", "always", "never"] = "auto"
    # processes that train one model, one per GPU; more than 1 with any backend but torch
    ranks: PositiveInt = 1
    deepspeed: DeepspeedSection = DeepspeedSection()
    megatron: MegatronSection = MegatronSection()
    lr: PositiveFloat = 1e-6
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: NonNegativeInt = 0
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    # the learner closes a ticket that no hub ended; null: derived, see broker.settings.timeouts
    ticket_timeout_s: PositiveFloat | None = None
    weights_bucket_mib: PositiveFloat = 32.0
    weights_timeout_s: PositiveFloat = 30.0  # longest wait for one bucket
    # auto, null: each server by its best of nccl (from a GPU), shared and gloo; shared: servers on
    # this host read the learner's memory, others by gloo; gloo: all by gloo; nccl: only between
    # GPUs; ipc: servers read the learner's GPU, others by gloo; curve: all encrypted, for untrusted
    # networks
    weights_backend: Literal["auto", "shared", "gloo", "nccl", "ipc", "curve"] | None = "auto"
    # all ranks send the weights that they hold, at the same time; auto: with several nodes, where
    # each has its own link
    weights_stripes: Literal["auto", "always", "never"] = "auto"
    # interface on which servers of other hosts find the weights, such as eth0; null: that which
    # reaches the broker
    weights_interface: Annotated[str, Field(min_length=1)] | None = None
    # of the rendezvous, and of all of curve; 0: any free one
    weights_port: Annotated[int, Field(ge=0, le=65535)] = 0
    # dtype on the wire, null: rollout.dtype, else unchanged; fp8: linear layers as float8_e4m3fn,
    # one scale per 128 x 128, others 16 bits
    weights_dtype: Literal["float32", "bfloat16", "float16", "fp8"] | None = None
    # send only changes, to servers that hold the version before; one copy more in memory
    weights_delta: bool = False
    weights_full_every: PositiveInt = 50  # with weights_delta: every n-th transfer sends everything
    # versions between two snapshots in the run's folder, for rollout-server --snapshot; 0 none
    weights_snapshot_every: NonNegativeInt = 0
    # HTTP port for snapshots, at broker.bind, or with a certificate at the weights' interface; 0
    # any free, null none
    weights_snapshot_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    # file with the TLS certificate of that server, PEM; null: no TLS
    weights_snapshot_cert: str | None = None
    weights_snapshot_key: str | None = None  # file with its private key, PEM


class RewardNormalization(Section):
    """Normalization of rewards before the estimator; off if both types are null."""

    # same ticket, first anchor, domain; all
    grouping: Literal["traj_group_id", "state", "inductive", "batch"] = "traj_group_id"
    norm_mean_type: Literal["group", "batch"] | None = None  # which mean is subtracted
    norm_std_type: Literal["group", "batch"] | None = None  # which standard deviation divides


class CriticSection(Section):
    """Value model of the policy's architecture, trained with it."""

    enabled: bool = False
    lr: PositiveFloat = 1e-5
    weight_decay: NonNegativeFloat = 0.0
    max_grad_norm: NonNegativeFloat = 1.0  # 0 is off
    # values move at most this far from those at the step's start; null: no limit
    clip: PositiveFloat | None = 0.2
    warmup_steps: NonNegativeInt = 0  # steps that train only the critic


class AlgorithmSection(Section):
    """Options of the gradient: advantages, loss, corrections, KL, filters."""

    adv_estimator: str = "grpo"  # a name of the registry in learner/algorithm/advantages
    norm_std: bool = True  # divide by the group's standard deviation
    # discount: per sampled token, in gigpo per turn
    gamma: Annotated[float, Field(ge=0, le=1)] = 1.0
    gae_lambda: Annotated[float, Field(ge=0, le=1)] = 1.0
    # gigpo: weight of the step's advantage relative to the episode's
    step_advantage_w: NonNegativeFloat = 1.0
    # gigpo: least similarity of observations of one state
    anchor_similarity: Annotated[float, Field(gt=0, le=1)] = 1.0
    reward_normalization: RewardNormalization = RewardNormalization()
    reward_clip: PositiveFloat | None = None  # clips rewards to [-x, x], after normalization
    format_penalty: NonNegativeFloat = 0.0  # subtracted for each turn that parsed to no action
    # tokens before overlong_length over which the penalty grows; 0 is off
    overlong_buffer: NonNegativeInt = 0
    # sampled tokens of a trajectory at which the penalty is full
    overlong_length: PositiveInt | None = None
    overlong_factor: PositiveFloat = 1.0
    # truncated samples count in their group's mean, but are not trained on
    mask_truncated: bool = False
    whiten_advantages: bool = False  # over the trained tokens of the step
    advantage_clip: PositiveFloat | None = None  # clips advantages to [-x, x], after whitening
    # starpo_s: groups of a step that are trained on
    keep_fraction: Annotated[float, Field(gt=0, le=1)] = 0.25
    pg_variant: str = "ppo"  # a name of the registry in learner/algorithm/losses
    clip_low: Annotated[float, Field(ge=0, le=1)] = 0.2
    clip_high: Annotated[float, Field(ge=0)] = 0.2
    dual_clip: PositiveFloat | None = None
    # topr: level of the tapered ratio
    importance_sampling_level: Literal["sequence", "token"] = "sequence"
    correction: str = "none"  # a name of the registry in learner/algorithm/corrections
    # level of the bounded ratio
    correction_level: Literal["token", "sequence", "geometric"] = "token"
    correction_low: NonNegativeFloat = 0.5  # icepop, mis: ratios below are masked
    # ratios above are truncated (tis, decoupled) or masked (icepop, mis)
    correction_high: PositiveFloat = 2.0
    # decoupled: applied to ratios above correction_high
    correction_mode: Literal["truncate", "mask"] = "truncate"
    # mis: level of the mask; null: correction_level
    mis_mask_level: Literal["token", "sequence", "geometric"] | None = None
    # k1 bounds the ratio, k2 and k3 the divergence by correction_high
    mis_estimator: Literal["k1", "k2", "k3"] = "k1"
    # nats per token; bad sequences further than this from the policy are masked
    opsm_delta: NonNegativeFloat = 1e-4
    # source of the logprobs at the step's start
    prox_logp_method: Literal["recompute", "interpolate"] = "recompute"
    num_epochs: PositiveInt = 1  # passes over a step's samples
    num_minibatches: PositiveInt = 1  # updates of one pass
    # makes minibatches equally large; null: they need not be
    batch_adjust: Literal["copy", "delete", "auto", "random_sample"] | None = None
    loss_agg_mode: AggregationMode = "token-mean"  # pg_variant gspo: seq-mean-token-mean
    kl_coef: NonNegativeFloat = 0.0  # 0: no reference model is loaded
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    kl_placement: Literal["loss", "reward"] = "loss"
    # nats per token; the coefficient starts at kl_coef and adapts to it
    kl_target: PositiveFloat | None = None
    kl_horizon: PositiveFloat = 10000.0  # sequences over which it adapts
    entropy_coef: NonNegativeFloat = 0.0
    critic: CriticSection = CriticSection()
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
        """Average as GSPO does unless the mode is set (Zheng et al., arXiv 2507.18071)."""
        if isinstance(values, dict) and values.get("pg_variant") == "gspo":
            return {"loss_agg_mode": "seq-mean-token-mean"} | values
        return values


def num_updates(algorithm: AlgorithmSection) -> int:
    """Return the number of optimizer updates per step."""
    return algorithm.num_epochs * algorithm.num_minibatches


def kl_in_reward(algorithm: AlgorithmSection) -> bool:
    """Return whether rewards depend on the divergence from the reference."""
    return algorithm.kl_coef > 0 and algorithm.kl_placement == "reward"


class WarmStartSection(Section):
    """Supervised steps before the first version, for models built by this project."""

    steps: NonNegativeInt = 0  # 0: none
    domain: str = ""  # whose demonstrations; empty: the only domain
    episodes: PositiveInt = 512  # demonstrations written by ``envhub demos``
    noise: Annotated[float, Field(ge=0, le=1)] = 0.5  # share of random moves in them
    data: str | None = None  # a JSONL of conversations instead of demonstrations
    batch_size: PositiveInt = 32
    lr: PositiveFloat = 1e-3


class EvalSection(Section):
    """Evaluation on held-out tasks, without stopping training."""

    every_steps: NonNegativeInt = 0  # 0: never
    tasks: PositiveInt | None = None  # per domain; null: 256, or the fewest that a domain has
    group_size: PositiveInt = 1  # episodes per task
    temperature: NonNegativeFloat = 1.0
    at_start: bool = True
    baseline: str = ""  # policy measured once for comparison, for example ``random``; empty: none
    # other policies, measured on the same tasks at every evaluation
    against: list[str] = Field(default_factory=list)
    # engine_args of the server of ``random`` in ``rlearner up``
    baseline_args: dict[str, Any] = Field(default_factory=dict)
    # without a new result, an evaluation ends after this; null: derived, see
    # broker.settings.timeouts
    timeout_s: PositiveFloat | None = None


class CheckpointSection(Section):
    """When checkpoints are taken, and how many are kept."""

    every_steps: NonNegativeInt = 0  # at multiples of this step; 0: never
    # at the first step that ends this long after the last checkpoint; 0: never
    every_minutes: NonNegativeFloat = 10
    keep: Annotated[int, Field(ge=2)] = 2
    # write the weights also in Hugging Face format, up to this size; `rlearner export` writes those
    # of larger models
    hf_max_gib: NonNegativeFloat = 8


class SamplesSection(Section):
    """Archive of consumed records, for trace, audit and replay without a broker."""

    keep: bool = False  # archive them in the run's folder
    max_file_mib: PositiveFloat = 256.0  # of one file of the archive


class TrackersSection(Section):
    """Destinations of metrics in addition to metrics.jsonl."""

    # names of the registry in learner/reporting/trackers
    use: list[str] = Field(default_factory=lambda: ["tensorboard"])
    project: str = "rlearner"
    args: dict[str, dict[str, Any]] = Field(default_factory=dict)  # of each tracker by its name
    # steps between training episodes shown as text; 0: none, also not of evaluations
    texts_every: NonNegativeInt = 10
    # an animated episode per evaluation and domain, if the environment draws its states
    pictures: bool = True


class FailuresSection(Section):
    """When to end a run whose groups only fail; see ``learner/give_up.py``."""

    # if the first n groups fail; null: 4 * train.groups_per_step; 0: never
    give_up_after: NonNegativeInt | None = None
    # share of failures, by domain weights, among the last max(4 * groups_per_step, 32) groups of
    # each domain; 1.0: all
    max_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    # seconds with all hubs of a domain broken and nothing trained; 12 times that if it ever worked;
    # 0: never
    give_up_after_s: NonNegativeFloat = 600.0
