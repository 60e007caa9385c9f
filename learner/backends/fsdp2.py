"""Sharded data parallel on several ranks: weights, gradients and optimizer lie in parts of like size on all of them (FSDP2).

Each transformer block is gathered while it computes; gradients are summed and scattered after each backward pass, in float32. Offers and
checkpoints gather the weights bucket by bucket, so no rank but rank 0's host memory ever holds the whole. See ``learner.backends.ranks``
for who does what.
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

from learner.backends.ddp import DdpBackend
from learner.backends.gathered import Gathered, buckets_of
from learner.backends.optim import Optimizer
from learner.config import TrainSection


class ShardedOptimizer(Optimizer):
    """AdamW over the parts that this rank holds."""

    def __init__(self, parameters: Mapping[str, DTensor], train: TrainSection, mesh: DeviceMesh) -> None:
        self._mesh, self._sharded = mesh, dict(parameters)
        parts = {name: nn.Parameter(parameter.to_local().detach()) for name, parameter in parameters.items()}  # the same memory
        super().__init__(parts, train)

    @torch.no_grad()
    def collect(self) -> None:
        """After each backward pass: take the gradients that FSDP scattered."""
        for name, parameter in self._sharded.items():
            if parameter.grad is not None:
                assert isinstance(parameter.grad, DTensor)
                found = parameter.grad.to_local().to(self._live[name].dtype)
                live = self._live[name]
                live.grad = found if live.grad is None else live.grad.add_(found)
                parameter.grad = None
        super().collect()

    def discard(self) -> None:
        """Forget the gradient."""
        for parameter in self._sharded.values():
            parameter.grad = None
        super().discard()

    def norm(self, gradients: list[Tensor]) -> Tensor:
        """Over all ranks."""
        squares = torch.stack([gradient.double().square().sum() for gradient in gradients]).sum().to(self._mesh.device_type)
        dist.all_reduce(squares)
        return squares.sqrt().float()

    def whole(self, name: str, tensor: Tensor) -> Tensor:
        """Gathered; all ranks ask for the same at the same time."""
        if tensor.ndim == 0:
            return tensor
        like = self._sharded[name]
        held = tensor.detach().to(self._mesh.device_type)
        parts = DTensor.from_local(held, self._mesh, [Shard(0)], run_check=False, shape=like.shape, stride=like.stride())
        return parts.full_tensor()

    def own(self, name: str, tensor: Tensor) -> Tensor:
        """Scattered from rank 0; all ranks ask for the same at the same time."""
        if tensor.ndim == 0:
            tensor = tensor.to(self._mesh.device_type, copy=True)
            dist.broadcast(tensor, 0)
            return tensor
        return distribute_tensor(tensor.to(self._mesh.device_type), self._mesh, [Shard(0)]).to_local()

    def empty_state(self) -> dict[str, Tensor]:
        """Of the names and shapes that ``state`` has; what rank 0 scatters is written over it."""
        found = {"updates": torch.tensor(self.updates)}
        for name, master in self._masters.items():
            shape = self._sharded[name].shape
            for kind, tensor in self._adamw.state[master].items():
                found[f"{kind}.{name}"] = torch.empty(shape if tensor.ndim else (), dtype=tensor.dtype)
        return found | {f"master.{name}": torch.empty(self._sharded[name].shape) for name in self._rounded}


class Fsdp2Backend(DdpBackend):
    """See ``learner.backends.base.Backend``."""

    target: ClassVar[str] = "learner.backends.fsdp2:Fsdp2Backend"
    same_number: ClassVar[bool] = True  # of slices on every rank: each pass gathers and scatters
    together: ClassVar[bool] = True

    def _make_optimizer(self, train: TrainSection) -> Optimizer:
        if self.size == 1:
            return super()._make_optimizer(train)
        self._meet()
        self._mesh = init_device_mesh(self.device.type, (self.size,))
        module = self.policy.module
        self._shapes = self.policy.shapes()
        precision = MixedPrecisionPolicy(reduce_dtype=torch.float32)
        layers = [layer for layer in module.modules() if type(layer).__name__ in (module._no_split_modules or ())]
        for part in (*layers, module):
            fully_shard(part, mesh=self._mesh, reshard_after_forward=True, mp_policy=precision)
            part.set_gradient_divide_factor(1.0)  # a sum over ranks, like every other sum here
            part.set_force_sum_reduction_for_comms(True)  # gloo knows no other
        module.within = MethodType(_within, module)
        register_fsdp_forward_method(module, "within")
        self.policy.within = module.within
        self._tensors = {**module.state_dict(), **dict(module.named_parameters())}
        self._buckets = buckets_of(self._shapes)
        trained = {n: p for n, p in module.named_parameters() if isinstance(p, DTensor) and p.requires_grad}
        return ShardedOptimizer(trained, train, self._mesh)

    def shapes(self) -> dict[str, Tensor]:
        """As ``weights``, on the meta device."""
        return super().shapes() if self.size == 1 else self._shapes

    def weights(self) -> Mapping[str, Tensor]:
        """The weights of now, gathered as they are asked for; all of it before the next step."""
        return super().weights() if self.size == 1 else Gathered(list(self._shapes), self._buckets, self._gather_all)

    def _gather_factors(self) -> dict[str, Tensor]:
        """The adapters, whole, by all ranks at once."""
        adapters = self.policy.adapters
        return super()._gather_factors() if self.size == 1 or adapters is None else adapters.factors(self._find)

    @torch.no_grad()
    def _gather(self, bucket: int) -> dict[str, Tensor]:
        return {name: self.policy.whole(name, self._find) for name in self._buckets[bucket]}

    def _find(self, name: str) -> Tensor:
        """One of the module's tensors; all ranks ask for the same at the same time."""
        tensor = self._tensors[name].detach()
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def _reduced_step(self, denominator: float, at: int) -> dict[str, float]:
        return self._optimizer.step(denominator, at)  # FSDP has summed the gradients


def _within(_: nn.Module, function: Callable[..., Tensor | tuple[Tensor, ...]], *arguments: object) -> Tensor | tuple[Tensor, ...]:
    found = function(*arguments)
    if isinstance(found, Tensor):
        return found
    return tuple(tensor.clone() if tensor._is_view() else tensor for tensor in found)  # a hook on a view may be lost
