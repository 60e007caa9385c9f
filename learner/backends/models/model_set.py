"""The models of one rank: policy, reference and critic, loaded and prepared for training."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from broker.errors import ConfigError
from broker.weights.adapter import digest_of
from broker.weights.memory.staging import plan_of
from learner.backends.context import RunContext
from learner.backends.models.batch import TokenBatch
from learner.backends.models.critic import ValueModel
from learner.backends.models.lora_targets import describe_share
from learner.backends.models.policy import PolicyModel
from learner.backends.parts.hugging_face import ADAPTER_FOLDER
from learner.config import kl_in_reward

log = logging.getLogger(__name__)

# Takes a path, and whether the model is trained.
LoadModel = Callable[[str, bool], Any]


class FrozenBase:
    """The model below the adapters: a reference policy without weights of its own."""

    unpackable = ""

    def __init__(self, policy: PolicyModel) -> None:
        self._policy = policy

    def score(self, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        """As ``PolicyModel.score``, without gradient."""
        assert self._policy.adapters is not None
        with self._policy.adapters.off(), torch.no_grad():
            return self._policy.score(batch)


class ModelSet:
    """Policy, reference and critic.

    Args:
        rank: of this process; rank 0 offers the weights.
        load: replaces ``PolicyModel`` for policy and reference; models must have its methods that
            the backend calls.
        kind: class of policy and reference without ``load``.

    Attributes:
        ref: None where the algorithm has no divergence from a reference.
        packs: whether all of the models take packed rows.
        base_digest: of the weights below the adapters; empty unless adapters are offered by
            themselves.
    """

    def __init__(
        self,
        context: RunContext,
        device: torch.device,
        rank: int,
        load: LoadModel | None = None,
        *,
        kind: type[PolicyModel] = PolicyModel,
    ) -> None:
        train = context.train
        algorithm = context.algorithm
        critic = context.algorithm.critic
        first = context.first_path
        self._context = context
        load = load or (
            lambda path, trained: kind(
                path,
                device=device,
                trainable=trained,
                exact=context.exact and trained,
                **context.loading,
            )
        )
        self.policy: PolicyModel = load(context.policy_path, True)
        self.base_digest = ""
        if train.lora is not None:
            if train.lora.send == "adapter" and rank == 0:
                plan = plan_of(
                    self.policy.shapes(), train.weights_bucket_mib, dtype=train.weights_dtype
                )
                # Servers apply the adapters to whole weights, so the digest is of these.
                self.base_digest = digest_of(plan, self.policy.weights())
            sizes = {name: tensor.numel() for name, tensor in self.policy.shapes().items()}
            adapters = self.policy.adapt(train.lora, context.seed)
            if rank == 0:
                log.info("train.lora: %s", describe_share(sizes, adapters.adapted))
            if context.model_path != first:
                adapters.load(
                    Path(context.model_path) / ADAPTER_FOLDER, self.policy.tensors().__getitem__
                )
        self.ref: PolicyModel | FrozenBase | None = None
        if algorithm.kl_coef:
            self.ref = FrozenBase(self.policy) if train.lora else load(first, False)
        self.critic: ValueModel | None = None
        if critic.enabled:
            self.critic = ValueModel(
                first,
                critic,
                train,
                model=context.model,
                device=device,
                max_context=context.max_context,
            )
        self.packs = False
        if getattr(self.policy, "empty", None) is None:
            self.decide_packing()
        if train.compile:
            for model in (self.policy, self.ref):
                if model is not None and not isinstance(model, FrozenBase):
                    model.compile_blocks()
        if train.gradient_checkpointing:
            self.policy.checkpoint_blocks()

    def decide_packing(self) -> None:
        """Decide whether rows are packed, once all models have their weights."""
        self.packs = self._context.packing and self.can_pack(self.policy, self.ref, self.critic)

    def trained_parameters(self) -> dict[str, nn.Parameter]:
        """Return the policy's parameters that are trained, by name."""
        return {
            name: parameter
            for name, parameter in self.policy.module.named_parameters()
            if parameter.requires_grad
        }

    def modules(self) -> list[nn.Module]:
        """Return the modules of all models."""
        modules = [model.module for model in (self.policy, self.critic) if model is not None]
        # A frozen base is a view of the policy.
        if isinstance(self.ref, PolicyModel):
            modules.append(self.ref.module)
        return modules

    @property
    def kl_in_loss(self) -> bool:
        """Whether the divergence from the reference is part of the loss."""
        return self.ref is not None and not kl_in_reward(self._context.algorithm)

    @property
    def kl_in_reward(self) -> bool:
        """Whether the divergence from the reference is part of the reward."""
        return self.ref is not None and not self.kl_in_loss

    def can_pack(self, *models: PolicyModel | FrozenBase | ValueModel | None) -> bool:
        """Decide whether all of the models take packed rows.

        Raises:
            ConfigError: if one does not, and ``train.packing`` requires it.
        """
        packing = self._context.train.packing
        problem = next(
            (model.unpackable for model in models if model is not None and model.unpackable), ""
        )
        if problem and packing == "packed":
            allowed = f"{self.policy.path} is not exact in packed rows ({problem}): auto or padded"
            raise ConfigError("train.packing", packing, allowed)
        if problem:
            log.info("rows are padded, not packed: %s", problem)
        return not problem
