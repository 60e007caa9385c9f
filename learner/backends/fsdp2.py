"""Sharded data parallel (FSDP2): each rank holds an equal part of weights, gradients and optimizer.

Each transformer block is gathered while it computes; each backward pass sums and scatters gradients
in float32. Offers and checkpoints gather the weights bucket by bucket, so only rank 0's host memory
holds the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import prod
from types import MethodType
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from learner.backends.context import RunContext
from learner.backends.models.empty_model import EmptyModel, refuse_non_finite
from learner.backends.models.model_set import ModelSet
from learner.backends.models.policy import PolicyModel
from learner.backends.optimizer import MasterOptimizer
from learner.backends.parts.slices import Slice
from learner.backends.parts.sources import CastWeights
from learner.backends.passes import ModelPasses
from learner.backends.ranks.group import RankGroup, RankLayout
from learner.backends.torch import BuildWorker, TorchBackend
from learner.backends.weights import ShardedWeights
from learner.backends.worker import RankWorker, build_worker, prepare_process
from learner.config import TrainSection


class ShardedOptimizer(MasterOptimizer):
    """AdamW over the parts that this rank holds."""

    def __init__(
        self, parameters: Mapping[str, DTensor], train: TrainSection, mesh: DeviceMesh
    ) -> None:
        self._mesh = mesh
        self._sharded = dict(parameters)
        # The same memory, so that an update of a part is an update of the model.
        parts = {name: nn.Parameter(p.to_local().detach()) for name, p in parameters.items()}
        super().__init__(parts, train)

    @torch.no_grad()
    def collect(self) -> None:
        """After each backward pass, take the gradients that FSDP scattered."""
        for name, parameter in self._sharded.items():
            if parameter.grad is not None:
                assert isinstance(parameter.grad, DTensor)
                live = self._live[name]
                gradient = parameter.grad.to_local().to(live.dtype)
                live.grad = gradient if live.grad is None else live.grad.add_(gradient)
                # Otherwise FSDP would add the next pass to a gradient that is counted already.
                parameter.grad = None
        super().collect()

    def discard(self) -> None:
        for parameter in self._sharded.values():
            parameter.grad = None
        super().discard()

    def norm(self, gradients: list[Tensor]) -> Tensor:
        squares = (
            torch.stack([g.double().square().sum() for g in gradients])
            .sum()
            .to(self._mesh.device_type)
        )
        dist.all_reduce(squares)
        return squares.sqrt().float()

    def slice_of(self, kind: str, name: str, tensor: Tensor) -> Slice:
        if tensor.ndim == 0:
            return super().slice_of(kind, name, tensor)
        return _row_slice(f"{kind}.{name}", self._sharded[name], tensor)


def _row_slice(name: str, like: DTensor, rows: Tensor) -> Slice:
    """Return the slice that is a rank's rows of a tensor that is divided like another."""
    shape = tuple(like.shape)
    _, (first, *_) = compute_local_shape_and_global_offset(shape, like.device_mesh, like.placements)
    # A rank without rows has no first row, whatever torch computes for it.
    start = first * prod(shape[1:]) if rows.numel() else 0
    return Slice(name, shape, start, rows)


class Fsdp2Weights(ShardedWeights):
    """Weights that FSDP divides; reading them takes all ranks."""

    def divide(self) -> None:
        """From now on read the module's tensors as FSDP left them."""
        module = self._policy.module
        self._tensors = {**module.state_dict(), **dict(module.named_parameters())}

    @torch.no_grad()
    def gather(self, bucket: int) -> dict[str, Tensor]:
        return {name: self._policy.whole(name, self._find) for name in self.buckets[bucket]}

    def slices(self) -> Iterator[Slice]:
        for name, tensor in self._named(self._tensors.__getitem__).items():
            part = tensor.detach()
            if isinstance(part, DTensor):
                yield _row_slice(name, part, part.to_local())
            else:
                yield Slice.whole(name, part)

    def factors(self) -> dict[str, Tensor]:
        if self._policy.adapters is None:
            return {}
        return self._policy.adapters.factors(self._find)

    def _find(self, name: str) -> Tensor:
        tensor: Tensor = self._tensors[name].detach()
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()
        return tensor


class Fsdp2Backend(TorchBackend):
    """See ``learner.backends.base.Backend``."""

    takes_ranks: ClassVar[bool] = True

    @classmethod
    def plan(cls, context: RunContext) -> tuple[RunContext, BuildWorker]:
        """Divide the model only if there are several ranks."""
        if context.train.ranks > 1:
            return context, _build_sharded
        return context, build_worker


def _build_sharded(context: RunContext, ranks: RankGroup) -> RankWorker:
    device = prepare_process(context)

    def load(path: str, trained: bool) -> PolicyModel:
        divided = trained and context.train.lora is None
        return PolicyModel(
            path, device=device, trainable=trained, divided=divided, **context.loading
        )

    models = ModelSet(context, device, ranks.rank, load)
    ranks.join(device)
    policy = models.policy
    module = models.policy.module
    mesh = init_device_mesh(device.type, (ranks.size,))
    weights = Fsdp2Weights(policy)
    precision = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    layers = [
        layer
        for layer in module.modules()
        if type(layer).__name__ in (module._no_split_modules or ())
    ]
    for part in (*layers, module):
        fully_shard(part, mesh=mesh, reshard_after_forward=True, mp_policy=precision)
        # The learner divides by the tokens of all ranks: gradients are sums until then.
        part.set_gradient_divide_factor(1.0)
        # Gloo has no other reduction.
        part.set_force_sum_reduction_for_comms(True)
    module.within = MethodType(_run_within, module)
    register_fsdp_forward_method(module, "within")
    policy.within = module.within
    if policy.empty is not None:
        _fill_parameters(module, policy.empty, device)
        policy.probe()
        models.decide_packing()
    weights.divide()
    trained = {
        name: parameter
        for name, parameter in models.trained_parameters().items()
        if isinstance(parameter, DTensor)
    }
    optimizer = ShardedOptimizer(trained, context.train, mesh)
    passes = ModelPasses(context, models, optimizer, device, rank=ranks.rank)
    # Each pass gathers and scatters, so all ranks must make the same number of passes.
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
        # FSDP has summed the gradients in the backward passes.
        reduce=lambda: None,
        sharded=True,
    )


@torch.no_grad()
def _fill_parameters(module: nn.Module, empty: EmptyModel, device: torch.device) -> None:
    """Read this rank's rows of each parameter into memory that FSDP takes over."""

    shares: dict[str, Tensor] = {}

    def read_rows(name: str, like: Any) -> Tensor:
        local = torch.empty(like.to_local().shape, dtype=like.dtype, device=device)
        shares[name] = local
        empty.weights.read(name, _row_slice(name, like, local).start, local)
        mesh = like.device_mesh
        placements = like.placements
        whole = DTensor.from_local(
            local, mesh, placements, run_check=False, shape=like.shape, stride=like.stride()
        )
        return nn.Parameter(whole, like.requires_grad)

    empty.replace(read_rows, device)
    refuse_non_finite(empty.path, shares, CastWeights(empty.weights, shares), device)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            for group in part._get_fsdp_state()._fsdp_param_groups:
                for parameter in group.fsdp_params:
                    parameter.reset_sharded_param()  # type: ignore[no-untyped-call]


def _run_within(
    _: nn.Module, function: Callable[..., Tensor | tuple[Tensor, ...]], *arguments: object
) -> Tensor | tuple[Tensor, ...]:
    outputs = function(*arguments)
    if isinstance(outputs, Tensor):
        return outputs
    # FSDP registers hooks on the outputs, and hooks on views may be lost.
    return tuple(tensor.clone() if tensor._is_view() else tensor for tensor in outputs)
