"""Sharded data parallel (FSDP2): each rank holds an equal part of weights, gradients and optimizer.

Each transformer block is gathered while it computes; each backward pass sums and scatters gradients in float32.
Offers and checkpoints gather the weights bucket by bucket, so only rank 0's host memory holds the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MethodType
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from learner.backends.context import RunContext
from learner.backends.models.model_set import ModelSet
from learner.backends.optimizer import MasterOptimizer
from learner.backends.passes import ModelPasses
from learner.backends.ranks.group import RankGroup, RankLayout
from learner.backends.torch import BuildWorker, TorchBackend
from learner.backends.weights import ShardedWeights
from learner.backends.worker import RankWorker, build_worker, prepare_process
from learner.config import TrainSection


class ShardedOptimizer(MasterOptimizer):
    """AdamW over the parts that this rank holds."""

    def __init__(self, parameters: Mapping[str, DTensor], train: TrainSection, mesh: DeviceMesh) -> None:
        self._mesh, self._sharded = mesh, dict(parameters)
        parts = {name: nn.Parameter(p.to_local().detach()) for name, p in parameters.items()}  # the same memory
        super().__init__(parts, train)

    @torch.no_grad()
    def collect(self) -> None:
        """After each backward pass, take the gradients that FSDP scattered."""
        for name, parameter in self._sharded.items():
            if parameter.grad is not None:
                assert isinstance(parameter.grad, DTensor)
                live = self._live[name]
                found = parameter.grad.to_local().to(live.dtype)
                live.grad = found if live.grad is None else live.grad.add_(found)
                parameter.grad = None
        super().collect()

    def discard(self) -> None:
        for parameter in self._sharded.values():
            parameter.grad = None
        super().discard()

    def norm(self, gradients: list[Tensor]) -> Tensor:
        squares = torch.stack([g.double().square().sum() for g in gradients]).sum().to(self._mesh.device_type)
        dist.all_reduce(squares)
        return squares.sqrt().float()

    def whole(self, name: str, tensor: Tensor) -> Tensor:
        """Gather a tensor; collective."""
        if tensor.ndim == 0:
            return tensor
        like, own = self._sharded[name], tensor.detach().to(self._mesh.device_type)
        parts = DTensor.from_local(own, self._mesh, [Shard(0)], run_check=False, shape=like.shape, stride=like.stride())
        return parts.full_tensor()

    def own(self, name: str, tensor: Tensor) -> Tensor:
        """Scatter a tensor of rank 0; collective."""
        if tensor.ndim == 0:
            tensor = tensor.to(self._mesh.device_type, copy=True)
            dist.broadcast(tensor, 0)
            return tensor
        return distribute_tensor(tensor.to(self._mesh.device_type), self._mesh, [Shard(0)]).to_local()

    def empty_state(self) -> dict[str, Tensor]:
        """Return tensors of the names and shapes of ``state``, to receive what rank 0 scatters."""
        found = {"updates": torch.tensor(self.updates)}
        for name, master in self._masters.items():
            shape = self._sharded[name].shape
            for kind, tensor in self._adamw.state[master].items():
                found[f"{kind}.{name}"] = torch.empty(shape if tensor.ndim else (), dtype=tensor.dtype)
        return found | {f"master.{name}": torch.empty(self._sharded[name].shape) for name in self._rounded}


class Fsdp2Weights(ShardedWeights):
    """Weights that FSDP divides; reading them takes all ranks."""

    def divide(self) -> None:
        """From now on read the module's tensors as FSDP left them."""
        module = self._policy.module
        self._tensors = {**module.state_dict(), **dict(module.named_parameters())}

    @torch.no_grad()
    def gather(self, bucket: int) -> dict[str, Tensor]:
        return {name: self._policy.whole(name, self._find) for name in self.buckets[bucket]}

    def factors(self) -> dict[str, Tensor]:
        return {} if self._policy.adapters is None else self._policy.adapters.factors(self._find)

    def _find(self, name: str) -> Tensor:
        tensor = self._tensors[name].detach()
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Fsdp2Backend(TorchBackend):
    """See ``learner.backends.base.Backend``."""

    takes_ranks: ClassVar[bool] = True

    @classmethod
    def plan(cls, context: RunContext) -> tuple[RunContext, BuildWorker]:
        """Divide the model only if there are several ranks."""
        return context, _build_sharded if context.train.ranks > 1 else build_worker


def _build_sharded(context: RunContext, ranks: RankGroup) -> RankWorker:
    device = prepare_process(context)
    models = ModelSet(context, device, ranks.rank)
    ranks.join(device)
    policy, module = models.policy, models.policy.module
    mesh = init_device_mesh(device.type, (ranks.size,))
    weights = Fsdp2Weights(policy)
    precision = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    layers = [layer for layer in module.modules() if type(layer).__name__ in (module._no_split_modules or ())]
    for part in (*layers, module):
        fully_shard(part, mesh=mesh, reshard_after_forward=True, mp_policy=precision)
        part.set_gradient_divide_factor(1.0)  # a sum over ranks, like every other sum here
        part.set_force_sum_reduction_for_comms(True)  # the only reduction that gloo supports
    module.within = MethodType(_within, module)
    register_fsdp_forward_method(module, "within")
    policy.within = module.within
    weights.divide()
    trained = {n: p for n, p in models.trained().items() if isinstance(p, DTensor)}
    optimizer = ShardedOptimizer(trained, context.train, mesh)
    passes = ModelPasses(context, models, optimizer, device, rank=ranks.rank)
    layout = RankLayout.plain(ranks.size, same_number=True)  # each pass gathers and scatters
    # FSDP has summed the gradients, so nothing is left to reduce.
    return RankWorker(context, ranks, layout, device, models, optimizer, weights, passes, lambda: None, sharded=True)


def _within(
    _: nn.Module, function: Callable[..., Tensor | tuple[Tensor, ...]], *arguments: object
) -> Tensor | tuple[Tensor, ...]:
    found = function(*arguments)
    if isinstance(found, Tensor):
        return found
    return tuple(tensor.clone() if tensor._is_view() else tensor for tensor in found)  # hooks on views may be lost
