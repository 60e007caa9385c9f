"""The section ``train``, and what offline training shares with it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import (
    AfterValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)

from broker.contract.wire import Carrier
from broker.settings.config import Device, Section
from broker.telemetry.operator_profile import FOLDER, ProfilePlan

MAX_PROFILED: Final = 10  # steps whose operators are recorded
_STEPS: Final = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")

Beta = Annotated[float, Field(ge=0, lt=1)]  # of Adam's averages


class LoraSection(Section):
    """Low-rank adapters on frozen weights, instead of training all weights."""

    # inner width of an adapter
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


def _profiled_steps(value: str | int) -> range:
    """Return the steps of ``10`` or ``10-12``; none if it is neither."""
    match = _STEPS.fullmatch(str(value))
    if match is None:
        return range(0)
    return range(int(match[1]), int(match[2] or match[1]) + 1)


def _check_profiled(value: str | int) -> str | int:
    steps = _profiled_steps(value)
    if not 1 <= len(steps) <= MAX_PROFILED or steps[0] < 1:
        raise ValueError(f"a step or a range of at most {MAX_PROFILED}, for example 10-12")
    return value


class ProfileSection(Section):
    """Records the operators of torch, in the learner (rank 0) and in engine hf."""

    # a step or at most ten, for example 10-12; traces and a table of the ten largest operators in
    # the run's folder; null: none
    steps: Annotated[str | PositiveInt, AfterValidator(_check_profiled)] | None = None

    def plan(self, folder: Path, name: str) -> ProfilePlan | None:
        """Return what a process records; None for nothing.

        Args:
            folder: of the run.
            name: of the process.
        """
        if self.steps is None:
            return None
        steps = _profiled_steps(self.steps)
        return ProfilePlan(folder / FOLDER, name, steps[0], steps[-1])

    @property
    def last_step(self) -> int:
        """The last step that is recorded; 0 if none is."""
        return 0 if self.steps is None else _profiled_steps(self.steps)[-1]


class OptimizationSection(Section):
    """Options of training, shared by runs and offline training."""

    backend: str = "torch"  # a name of the registry in learner/backends
    device: Device = "auto"  # auto, cpu, cuda, cuda:1
    # peak learning rate of AdamW
    lr: PositiveFloat
    # how it falls after the warm-up, to 0 at the last step
    lr_schedule: Literal["constant", "linear", "cosine"]
    # of AdamW
    weight_decay: NonNegativeFloat = 0.0
    # decay of the averages of gradients and of their squares in AdamW
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
    # groups that one optimizer step is trained on
    groups_per_step: PositiveInt = 16
    max_staleness: NonNegativeInt = 1  # versions a trained token may lag behind
    # drop: groups are taken as they come, and replaced beyond max_staleness; wait: a step keeps
    # places for older tickets, so that no group is late
    on_late: Literal["drop", "wait"] = "wait"
    # whether a step starts before its last group is in
    streaming: Literal["auto", "always", "never"] = "auto"
    # processes that train one model, one per GPU; more than 1 with any backend but torch
    ranks: PositiveInt = 1
    deepspeed: DeepspeedSection = DeepspeedSection()
    megatron: MegatronSection = MegatronSection()
    profile: ProfileSection = ProfileSection()
    lr: PositiveFloat = 1e-6
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    # steps over which the learning rate rises from 0
    warmup_steps: NonNegativeInt = 0
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    # the learner closes a ticket that no hub ended; null: derived, see broker.settings.timeouts
    ticket_timeout_s: PositiveFloat | None = None
    # weights travel in buckets of this size
    weights_bucket_mib: PositiveFloat = 32.0
    weights_timeout_s: PositiveFloat = 30.0  # longest wait for one bucket
    # auto, null: each server by its best of nccl (from a GPU), shared and gloo; shared: servers on
    # this host read the learner's memory, others by gloo; gloo: all by gloo; nccl: only between
    # GPUs; ipc: servers read the learner's GPU, others by gloo; curve: all encrypted, for untrusted
    # networks
    weights_backend: Literal["auto", Carrier] | None = "auto"
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
