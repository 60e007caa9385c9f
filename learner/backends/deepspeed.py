"""DeepSpeed's ZeRO on several ranks: optimizer (stage 1), gradients too (2), weights too (3) lie in parts on all of them.

Or on one rank with its optimizer in host memory. See ``learner.backends.ranks`` for who does what.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from broker.errors import ConfigError
from learner.backends.ddp import DdpBackend
from learner.backends.deepspeed_saved import places_for_weights
from learner.backends.deepspeed_zero import DividedPolicy, ZeroOptimizer, library
from learner.backends.gathered import Gathered, buckets_of
from learner.backends.lora import Find
from learner.backends.optim import Optimizer
from learner.backends.policy import Policy
from learner.backends.ranks.meeting import join_alone
from learner.backends.ranks.messages import filler
from learner.backends.section_checks import check_deepspeed
from learner.config import TrainSection
from rlearner_text.config import ModelSection


class DeepspeedBackend(DdpBackend):
    """See ``learner.backends.base.Backend``."""

    target: ClassVar[str] = "learner.backends.deepspeed:DeepspeedBackend"
    same_number: ClassVar[bool] = True  # of slices on every rank: stages 2 and 3 reduce in each backward pass
    together: ClassVar[bool] = True

    def __init__(self, model_path: str, *, train: TrainSection, **others: Any) -> None:
        check_deepspeed({**train.model_dump(), "backend": "deepspeed"})
        self._sharded = train.deepspeed.stage == 3
        train = train.model_copy(update={"optimizer_offload": train.deepspeed.offload_optimizer})  # the critic's, which is not DeepSpeed's
        super().__init__(model_path, train=train, **others)

    def _load(self, path: str, model: ModelSection, *, trainable: bool = True, packing: bool) -> Policy:
        kind = DividedPolicy if trainable and self._sharded else Policy
        return kind(path, model, self.device, trainable=trainable, packing=packing)

    def _make_optimizer(self, train: TrainSection) -> Optimizer:
        self._meet()
        if self.size == 1:
            join_alone(self.device)
        module = self.policy.module
        self._shapes = self.policy.shapes()
        self._buckets = buckets_of(self._shapes)
        trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
        if len(kinds := {str(parameter.dtype).removeprefix("torch.") for parameter in trained.values()}) > 1:
            raise ConfigError("train.backend", "deepspeed", f"fsdp2: {self.policy.path} has weights of {' and '.join(sorted(kinds))}")
        self._zero = ZeroOptimizer(module, trained, train, self.device)
        self.policy.within = self._zero.engine
        self._tensors = {**module.state_dict(keep_vars=True), **dict(module.named_parameters())}
        return self._zero

    def _saving(self, train: bool) -> AbstractContextManager[Any]:
        return places_for_weights(self._offload) if train and self._sharded else super()._saving(train)

    def _backward(self, total: Tensor) -> None:
        self._zero.backward(total)

    def shapes(self) -> dict[str, Tensor]:
        """As ``weights``, on the meta device."""
        return self._shapes

    def weights(self) -> Mapping[str, Tensor]:
        """The weights of now; in stage 3 gathered as they are asked for, all of it before the next step."""
        return Gathered(list(self._shapes), self._buckets, self._gather_all) if self._sharded else super().weights()

    def close(self) -> None:
        """Let the other ranks leave."""
        super().close()
        self.part()

    def part(self) -> None:
        """Leave the group."""
        if dist.is_initialized():
            comm = library().comm
            if comm.is_initialized():
                comm.destroy_process_group()  # forgets what it knows of the group, too
        super().part()

    @torch.no_grad()
    def _gather(self, bucket: int) -> dict[str, Tensor]:
        names = self._buckets[bucket]
        with self._whole([part for name in names for part in self.policy.parts(name)]) as find:
            return {name: self.policy.whole(name, find).clone() for name in names}

    def _gather_factors(self) -> dict[str, Tensor]:
        """The adapters, whole, by all ranks at once."""
        adapters = self.policy.adapters
        if adapters is None or not self._sharded:
            return super()._gather_factors()
        with self._whole([name for name, tensor in self._tensors.items() if tensor.requires_grad]) as find:
            return {name: factor.clone() for name, factor in adapters.factors(find).items()}

    @contextmanager
    def _whole(self, names: Sequence[str]) -> Iterator[Find]:
        """Within it these of the module's tensors are whole on every rank; all ranks ask for the same at the same time."""
        held = {name: self._tensors[name] for name in names}
        with library().zero.GatheredParameters([tensor for tensor in held.values() if hasattr(tensor, "ds_id")]):
            yield lambda name: held[name].detach()

    def _optimizer_step(self, denominator: float, at: int) -> dict[str, float]:
        return self._reduced_step(denominator, at) if self._leader is None else super()._optimizer_step(denominator, at)

    def _reduced_step(self, denominator: float, at: int) -> dict[str, float]:
        if not self._zero.dirty:  # nothing was trained; moments fade as ever
            self._run([filler()], train=True)
        return self._zero.step(denominator, at)
