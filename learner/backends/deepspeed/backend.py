"""DeepSpeed's ZeRO: ranks divide the optimizer (stage 1), the gradients (2) and the weights (3).

A single rank can keep its optimizer in host memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from broker.errors import ConfigError
from learner.backends.context import RunContext
from learner.backends.deepspeed.saved_views import save_views_as_places
from learner.backends.deepspeed.zero_optimizer import (
    DividedPolicy,
    ZeroOptimizer,
    deepspeed_library,
    partition_slice,
)
from learner.backends.models.lora import Find
from learner.backends.models.model_set import ModelSet
from learner.backends.models.policy import PolicyModel
from learner.backends.parts.slices import Slice
from learner.backends.passes import ModelPasses
from learner.backends.ranks.group import RankGroup, RankLayout
from learner.backends.ranks.messages import filler_sample
from learner.backends.section_checks import check_deepspeed
from learner.backends.torch import BuildWorker, TorchBackend
from learner.backends.weights import ShardedWeights
from learner.backends.worker import RankWorker, prepare_process


class ZeroWeights(ShardedWeights):
    """Weights that DeepSpeed divides in stage 3, where reading them takes all ranks.

    Args:
        sharded: whether it is stage 3; in other stages shapes are kept and weights are whole.
    """

    def __init__(self, policy: PolicyModel, sharded: bool) -> None:
        super().__init__(policy)
        self._sharded = sharded
        self.buckets = self.buckets if sharded else ()

    def divide(self) -> None:
        """From now on read the module's tensors as DeepSpeed left them."""
        module = self._policy.module
        self._tensors = {**module.state_dict(keep_vars=True), **dict(module.named_parameters())}

    @torch.no_grad()
    def gather(self, bucket: int) -> dict[str, Tensor]:
        names = self.buckets[bucket]
        with self._whole([part for name in names for part in self._policy.parts(name)]) as find:
            return {name: self._policy.whole(name, find).clone() for name in names}

    def slices(self) -> Iterator[Slice]:
        tensors: dict[str, Any] = self._named(self._tensors.__getitem__)
        for name, tensor in tensors.items():
            if (partition := getattr(tensor, "ds_tensor", None)) is None:
                yield Slice.whole(name, tensor.detach())
            else:
                yield partition_slice(name, tuple(tensor.ds_shape), partition)

    def factors(self) -> dict[str, Tensor]:
        adapters = self._policy.adapters
        if adapters is None or not self._sharded:
            return super().factors()
        with self._whole(
            [name for name, tensor in self._tensors.items() if tensor.requires_grad]
        ) as find:
            return {name: factor.clone() for name, factor in adapters.factors(find).items()}

    @contextmanager
    def _whole(self, names: Sequence[str]) -> Iterator[Find]:
        """Gather some of the module's tensors on every rank while it is open; collective."""
        tensors = {name: self._tensors[name] for name in names}
        with deepspeed_library().zero.GatheredParameters(
            [tensor for tensor in tensors.values() if hasattr(tensor, "ds_id")]
        ):
            yield lambda name: tensors[name].detach()


class DeepspeedBackend(TorchBackend):
    """See ``learner.backends.base.Backend``."""

    takes_ranks: ClassVar[bool] = True
    offloads: ClassVar[bool] = False

    @classmethod
    def plan(cls, context: RunContext) -> tuple[RunContext, BuildWorker]:
        """Check ``train.deepspeed``."""
        train = context.train
        check_deepspeed(train.model_copy(update={"backend": "deepspeed"}))
        # DeepSpeed does not train the critic, whose optimizer follows the same setting.
        critic_settings = {"optimizer_offload": train.deepspeed.offload_optimizer}
        return replace(context, train=train.model_copy(update=critic_settings)), _build_worker


def _build_worker(context: RunContext, ranks: RankGroup) -> RankWorker:
    train = context.train
    sharded = context.train.deepspeed.stage == 3
    device = prepare_process(context)

    def load(path: str, trained: bool) -> PolicyModel:
        kind = DividedPolicy if trained and sharded else PolicyModel
        divided = trained and sharded and train.lora is None
        return kind(path, device=device, trainable=trained, divided=divided, **context.loading)

    models = ModelSet(context, device, ranks.rank, load)
    policy = models.policy
    module = models.policy.module
    ranks.before_leaving = _destroy_group
    ranks.join(device, alone=True)
    weights = ZeroWeights(policy, sharded)
    if (empty := policy.empty) is not None:
        empty.replace(_untouched_parameter, device)
    trained = models.trained_parameters()
    dtypes = {str(parameter.dtype).removeprefix("torch.") for parameter in trained.values()}
    if len(dtypes) > 1:
        allowed = f"fsdp2: {policy.path} has weights of {' and '.join(sorted(dtypes))}"
        raise ConfigError("train.backend", "deepspeed", allowed)
    read = None if empty is None else lambda name, parameter: empty.read(name, 0, parameter)
    optimizer = ZeroOptimizer(module, trained, train, device, read)
    policy.within = optimizer.engine
    if empty is not None:
        policy.probe()
        models.decide_packing()
    weights.divide()
    saving = partial(save_views_as_places, train.activation_offload) if sharded else None
    passes = ModelPasses(context, models, optimizer, device, rank=ranks.rank, saving=saving)

    def reduce() -> None:
        # Without a gradient DeepSpeed makes no update, but the moments must decay as elsewhere.
        if not optimizer.dirty:
            passes.run_one([filler_sample()], train=True)

    # Stages 2 and 3 reduce in each backward pass, so all ranks must make the same number of them.
    layout = RankLayout.plain(ranks.size, same_number=True)
    return RankWorker(
        context,
        ranks,
        layout,
        device=device,
        models=models,
        optimizer=optimizer,
        weights=weights,
        passes=passes,
        reduce=reduce,
        sharded=True,
    )


def _untouched_parameter(_: str, like: nn.Parameter) -> nn.Parameter:
    """Return a parameter whose memory is touched only when it is read, and freed when divided."""
    return nn.Parameter(torch.empty(like.shape, dtype=like.dtype), like.requires_grad)


def _destroy_group() -> None:
    comm = deepspeed_library().comm
    if comm.is_initialized():
        # torch's own function would leave DeepSpeed's record of the group behind.
        comm.destroy_process_group()
