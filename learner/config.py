"""The learner's sections: train, algorithm, warm_start, eval, checkpoint, samples, trackers, failures."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from broker.settings.config import Device, Section

Beta = Annotated[float, Field(ge=0, lt=1)]  # of Adam's averages


class LoraSection(Section):
    """Low-rank adapters on frozen weights, in place of training all of them."""

    rank: PositiveInt = 16
    alpha: PositiveInt = 32  # what the adapters add is multiplied by alpha / rank
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0  # of the adapters' inputs, in training passes alone
    target_modules: Literal["all-linear"] | Annotated[list[str], Field(min_length=1)] = "all-linear"  # q_proj, …; all but the output layer
    send: Literal["adapter", "merged"] = "adapter"  # what servers are sent: factors for them to merge, or the whole merged model


class DeepspeedSection(Section):
    """What train.backend deepspeed is told, by DeepSpeed's own names."""

    stage: Annotated[int, Field(ge=1, le=3)] = 2  # in parts on all ranks: 1 the optimizer, 2 gradients too, 3 weights too
    offload_optimizer: bool = False  # master weights and moments lie in host memory, where the update is made, too
    offload_param: bool = False  # stage 3: each rank's part of the weights waits in host memory
    reduce_bucket_size: PositiveInt = 50_000_000  # elements of the gradient reduced at once
    param_persistence_threshold: NonNegativeInt = 100_000  # stage 3: smaller weights stay whole on every rank; elements
    max_live_parameters: NonNegativeInt = 1_000_000_000  # stage 3: so much of the gathered weights may wait to be used again; elements


class MegatronSection(Section):
    """What train.backend megatron divides the model into; train.ranks holds as many copies as there is room for."""

    tensor_parallel: PositiveInt = 1  # ranks that hold each layer together; divides heads, key-value heads and MLP columns
    pipeline_parallel: PositiveInt = 1  # stages that the layers are divided into; divides their number


class Optimization(Section):
    """What trains a model, with a broker or without."""

    backend: str = "torch"  # a name of the registry in learner/backends
    device: Device = "auto"  # auto, cpu, cuda, cuda:1
    lr: PositiveFloat
    lr_schedule: Literal["constant", "linear", "cosine"]
    weight_decay: NonNegativeFloat = 0.0
    betas: tuple[Beta, Beta]
    max_grad_norm: NonNegativeFloat = 1.0  # 0 is off
    micro_batch_tokens: PositiveInt = 8192  # of one forward pass, padding included
    packing: Literal["auto", "packed", "padded"] = "auto"  # sequences share a row, each attending to itself; auto: if the model is exact so
    lora: LoraSection | None = None  # null: all weights are trained
    gradient_checkpointing: bool = False  # blocks compute their activations again in the backward pass: less memory, a third more time
    activation_offload: bool = False  # on a GPU: what the backward pass needs waits in host memory
    optimizer_offload: bool = False  # master weights and moments lie in host memory, where the update is made, too
    compile: bool = False  # blocks by torch.compile: faster passes on a GPU after a minute of compiling
    num_threads: NonNegativeInt = 0  # torch threads, 0 leaves the default


class TrainSection(Optimization):
    """How many steps, how large, how stale."""

    steps: Annotated[PositiveInt, Field(le=2**31 - 1)] = 100  # a version's number has 31 bits
    groups_per_step: PositiveInt = 16
    max_staleness: NonNegativeInt = 1  # versions a trained token may lag behind
    on_late: Literal["drop", "wait"] = "wait"
    streaming: Literal["auto", "always", "never"] = "auto"  # whether a step starts before its last group is in
    ranks: PositiveInt = 1  # processes that train one model together, on a GPU each; more than 1 with any backend but torch
    deepspeed: DeepspeedSection = DeepspeedSection()
    megatron: MegatronSection = MegatronSection()
    lr: PositiveFloat = 1e-6
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: NonNegativeInt = 0
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    ticket_timeout_s: PositiveFloat | None = (
        None  # the learner closes a ticket that nobody ended; null: derived, see broker.settings.timeouts
    )
    weights_bucket_mib: PositiveFloat = 32.0
    weights_timeout_s: PositiveFloat = 30.0  # longest wait for one bucket
    # shared: servers of this host read them in the learner's memory, others get them by gloo; gloo: all by gloo; nccl: between GPUs, to no
    # server that takes them in host memory (vllm, sglang); ipc: servers read them on the learner's GPU, others get them by gloo, not run
    # on a GPU yet; auto, null: nccl from a GPU, else shared
    weights_backend: Literal["auto", "shared", "gloo", "nccl", "ipc"] | None = "auto"
    # what they travel as, null: as they are; fp8: linear layers as float8_e4m3fn, one scale for 128 x 128, other matrices in 16 bits
    weights_dtype: Literal["float32", "bfloat16", "float16", "fp8"] | None = None
    weights_delta: bool = False  # send only what has changed, exactly, to servers that hold the version before; one copy more in memory
    weights_full_every: PositiveInt = 50  # with weights_delta: of so many transfers in a row one sends everything
    weights_snapshot_every: NonNegativeInt = 0  # every so many are written into the run's folder, for rollout-server --snapshot; 0 none
    weights_snapshot_port: Annotated[int, Field(ge=0, le=65535)] | None = None  # HTTP for them at broker.bind; 0 any free port, null none


class RewardNormalization(Section):
    """Rewards to a common scale before any estimator sees them; both types null leave them alone."""

    grouping: Literal["traj_group_id", "state", "inductive", "batch"] = "traj_group_id"  # same ticket, first anchor, domain; all
    norm_mean_type: Literal["group", "batch"] | None = None  # whose mean is taken off
    norm_std_type: Literal["group", "batch"] | None = None  # whose standard deviation divides


class CriticSection(Section):
    """A value model of the policy's architecture, trained beside it."""

    enabled: bool = False
    lr: PositiveFloat = 1e-5
    weight_decay: NonNegativeFloat = 0.0
    max_grad_norm: NonNegativeFloat = 1.0  # 0 is off
    clip: PositiveFloat | None = 0.2  # values move at most this far from those of the step's start; null: as they like
    warmup_steps: NonNegativeInt = 0  # steps that train the critic alone


class AlgorithmSection(Section):
    """What the gradient is."""

    adv_estimator: str = "grpo"  # a name of the registry in learner/algorithm/advantages
    norm_std: bool = True  # divide by the group's standard deviation
    gamma: Annotated[float, Field(ge=0, le=1)] = 1.0  # discount: per sampled token, in gigpo per turn
    gae_lambda: Annotated[float, Field(ge=0, le=1)] = 1.0
    step_advantage_w: NonNegativeFloat = 1.0  # gigpo: weight of the step's advantage beside the episode's
    anchor_similarity: Annotated[float, Field(gt=0, le=1)] = 1.0  # gigpo: from here on two observations count as one state
    reward_normalization: RewardNormalization = RewardNormalization()
    reward_clip: PositiveFloat | None = None  # rewards into [-x, x], after normalisation
    format_penalty: NonNegativeFloat = 0.0  # taken off for each turn that parsed to no action
    overlong_buffer: NonNegativeInt = 0  # tokens before overlong_length over which the penalty grows; 0 is off
    overlong_length: PositiveInt | None = None  # sampled tokens of a trajectory at which the penalty is full
    overlong_factor: PositiveFloat = 1.0
    mask_truncated: bool = False  # samples cut for their length count in their group's mean, but are not trained on
    whiten_advantages: bool = False  # over the trained tokens of the step
    advantage_clip: PositiveFloat | None = None  # advantages into [-x, x], after whitening
    keep_fraction: Annotated[float, Field(gt=0, le=1)] = 0.25  # starpo_s: groups of a step that are trained on
    pg_variant: str = "ppo"  # a name of the registry in learner/algorithm/losses
    clip_low: Annotated[float, Field(ge=0, le=1)] = 0.2
    clip_high: Annotated[float, Field(ge=0)] = 0.2
    dual_clip: PositiveFloat | None = None
    importance_sampling_level: Literal["sequence", "token"] = "sequence"  # topr: whose ratio tapers
    correction: str = "none"  # a name of the registry in learner/algorithm/corrections
    correction_level: Literal["token", "sequence", "geometric"] = "token"  # whose ratio is bounded
    correction_low: NonNegativeFloat = 0.5  # icepop, mis: ratios below count nothing
    correction_high: PositiveFloat = 2.0  # ratios above are cut (tis, decoupled) or count nothing (icepop, mis)
    correction_mode: Literal["truncate", "mask"] = "truncate"  # decoupled: what becomes of ratios above correction_high
    mis_mask_level: Literal["token", "sequence", "geometric"] | None = None  # mis: whose ratio is masked by; null: correction_level
    mis_estimator: Literal["k1", "k2", "k3"] = "k1"  # k1 bounds the ratio on both sides, k2 and k3 the divergence by correction_high
    opsm_delta: NonNegativeFloat = 1e-4  # nats per token; bad sequences further than this from the policy count nothing
    prox_logp_method: Literal["recompute", "interpolate"] = "recompute"  # where the logprobs at the step's start come from
    num_epochs: PositiveInt = 1  # passes over a step's samples
    num_minibatches: PositiveInt = 1  # updates of one pass
    batch_adjust: Literal["copy", "delete", "auto", "random_sample"] | None = (
        None  # makes minibatches equally large; null: they need not be
    )
    loss_agg_mode: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"] = (
        "token-mean"  # pg_variant gspo: seq-mean-token-mean
    )
    kl_coef: NonNegativeFloat = 0.0  # 0: no reference model is loaded
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    kl_placement: Literal["loss", "reward"] = "loss"
    kl_target: PositiveFloat | None = None  # nats per token; the coefficient, from kl_coef on, follows it
    kl_horizon: PositiveFloat = 10000.0  # sequences over which it does
    entropy_coef: NonNegativeFloat = 0.0
    critic: CriticSection = CriticSection()
    filter_zero_variance: bool = False  # dynamic sampling: such groups are filtered and replaced
    group_filter: str = (
        ""  # a name of the registry in learner/algorithm/filters, or your function: groups that it does not want are replaced, too
    )
    max_replacements_per_step: NonNegativeInt = 64  # at this bound what there is gets trained

    @model_validator(mode="before")
    @classmethod
    def _aggregate_as_the_loss_does(cls, values: Any) -> Any:
        """GSPO averages over tokens, then over sequences (Zheng et al., arXiv 2507.18071), unless the mode is set."""
        if isinstance(values, dict) and values.get("pg_variant") == "gspo":
            return {"loss_agg_mode": "seq-mean-token-mean"} | values
        return values


def num_updates(algorithm: AlgorithmSection) -> int:
    """Optimizer updates of one step."""
    return algorithm.num_epochs * algorithm.num_minibatches


def kl_in_reward(algorithm: AlgorithmSection) -> bool:
    """Whether rewards depend on the divergence from the reference."""
    return algorithm.kl_coef > 0 and algorithm.kl_placement == "reward"


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
    tasks: PositiveInt | None = None  # per domain; null: 256, or as many as the domain with the fewest has
    group_size: PositiveInt = 1  # episodes per task
    temperature: NonNegativeFloat = 1.0
    at_start: bool = True
    baseline: str = ""  # policy measured once beside the actor, for example ``random``; empty: none
    against: list[str] = Field(default_factory=list)  # other policies, measured on the same tasks at every evaluation
    baseline_args: dict[str, Any] = Field(default_factory=dict)  # engine_args of the server of ``random`` in ``rlearner up``
    timeout_s: PositiveFloat | None = None  # the run waits this long for its last evaluation; null: derived, see broker.settings.timeouts


class CheckpointSection(Section):
    """What is left on disk."""

    every_steps: NonNegativeInt = 0  # at steps that this divides; 0: never
    every_minutes: NonNegativeFloat = 10  # at the first step that ends so long after the last one was taken; 0: never
    keep: Annotated[int, Field(ge=2)] = 2


class SamplesSection(Section):
    """Whether consumed records are kept, for trace, audit and replay without a broker."""

    keep: bool = False  # archive them in the run's folder
    max_file_mib: PositiveFloat = 256.0  # of one file of the archive


class TrackersSection(Section):
    """Where metrics go beside metrics.jsonl."""

    use: list[str] = Field(default_factory=lambda: ["tensorboard"])  # names of the registry in learner/reporting/trackers
    project: str = "rlearner"
    args: dict[str, dict[str, Any]] = Field(default_factory=dict)  # of each tracker by its name
    texts_every: NonNegativeInt = 10  # steps between two training episodes shown as text, with those of each evaluation; 0: no texts
    pictures: bool = True  # an animated episode of each evaluation and domain, where the environment draws its states


class FailuresSection(Section):
    """When a run whose groups only fail ends, with exit code 2 and the most frequent reason; see learner/give_up.py."""

    give_up_after: NonNegativeInt | None = None  # groups, if all of the first ones fail; null: 4 * train.groups_per_step; 0: never
    # share of failures, by domain weights, among the last max(4 * groups_per_step, 32) groups of each domain; 1.0: all of them
    max_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    # seconds in which all hubs of a domain are broken and nothing is trained; 12 times as long if it worked before; 0: never
    give_up_after_s: NonNegativeFloat = 600.0
