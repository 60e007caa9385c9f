"""What a torch backend holds: models, optimizer, and all else that a checkpoint needs."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from broker.contract import wire
from broker.errors import ConfigError
from broker.weights import fp8
from broker.weights.adapter import PREFIX, digest_of
from broker.weights.memory.staging import plan_of
from learner.algorithm.aggregation import BatchCounts
from learner.algorithm.kl import KlCoefficient
from learner.backends.as_sent import as_sent
from learner.backends.base import Snapshot
from learner.backends.critic import Critic
from learner.backends.lora import FOLDER, Base
from learner.backends.objective import Objective
from learner.backends.optim import Optimizer
from learner.backends.policy import Policy, pick_device
from learner.config import AlgorithmSection, TrainSection, kl_in_reward
from rlearner_text.config import ModelSection
from rlearner_text.hub import copy_tokenizer

log = logging.getLogger(__name__)

_CPU_SLICE_TOKENS: Final = 2048  # larger slices pad more and fall out of the cache


class Held:
    """The part of ``learner.backends.base.Backend`` that is not about steps."""

    takes_ranks = False
    rank = 0  # of this process among those that train together

    def __init__(
        self,
        model_path: str,
        *,
        train: TrainSection,
        algorithm: AlgorithmSection,
        model: ModelSection,
        seed: int,
        ref_path: str | None = None,
        max_length: int | None = None,
    ) -> None:
        _check(algorithm, model, max_length)
        if train.ranks > 1 and not self.takes_ranks:
            raise ConfigError("train.ranks", train.ranks, f"{type(self).__name__} runs in one process; train.backend ddp takes several")
        if train.num_threads:
            torch.set_num_threads(train.num_threads)
        torch.manual_seed(seed)
        self._algorithm, self._max_length, self._seed = algorithm, max_length, seed
        self._objective = Objective(algorithm)
        self.device = pick_device(train.device)
        self._micro_tokens = train.micro_batch_tokens
        self._slice_tokens = min(train.micro_batch_tokens, _CPU_SLICE_TOKENS if self.device.type == "cpu" else train.micro_batch_tokens)
        packing = train.packing != "padded"
        self._first_path = first = ref_path or model_path  # stays; the checkpoint that was resumed from does not
        self.policy = self._load(first if train.lora else model_path, model, packing=packing)
        self._rounds = train.weights_dtype == fp8.NAME  # servers compute with other weights than these
        self._base_digest = ""
        if train.lora is not None:
            if train.lora.send == "adapter" and self.rank == 0:
                plan = plan_of(self.policy.shapes(), train.weights_bucket_mib, dtype=train.weights_dtype)
                self._base_digest = digest_of(plan, self.policy.weights())  # before there are adapters, and before ranks share them out
            adapters = self.policy.adapt(train.lora, seed)
            if model_path != first:
                adapters.load(Path(model_path) / FOLDER, self.policy.tensors().__getitem__)
        self._ref: Policy | Base | None = None
        if algorithm.kl_coef:
            self._ref = Base(self.policy) if train.lora else self._load(first, model, trainable=False, packing=packing)
        self._kl = KlCoefficient(algorithm.kl_coef, algorithm.kl_target, algorithm.kl_horizon)
        self._critic = Critic(first, algorithm.critic, train, model, self.device) if algorithm.critic.enabled else None
        self._packs = packing and self._can_pack(train.packing, self.policy, self._ref, self._critic)
        self._offload, self._drawn = train.activation_offload, (0, 0)
        if train.compile:
            for one in (self.policy, self._ref):
                if one is not None and not isinstance(one, Base):
                    one.compile_blocks()
        if train.gradient_checkpointing:
            self.policy.checkpoint_blocks()
        self._version = 0
        self._optimizer = self._make_optimizer(train)
        self._counts, self._sums = BatchCounts(), dict[str, float]()
        self._reward_kl: float | None = None

    def _load(self, path: str, model: ModelSection, *, trainable: bool = True, packing: bool) -> Policy:
        return Policy(path, model, self.device, trainable=trainable, packing=packing)

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return self.policy.vocab_size

    @property
    def version(self) -> int:
        """Steps completed, over all incarnations."""
        return self._version

    @property
    def kl_coef(self) -> float:
        """Weight of the divergence from the reference in the step under way."""
        return self._kl.value

    def close(self) -> None:
        """Nothing was started."""

    def shapes(self) -> dict[str, Tensor]:
        """As ``weights``, on the meta device."""
        return self.policy.shapes()

    def weights(self) -> Mapping[str, Tensor]:
        """The live tensors by their state-dict names, tied ones once; they change at the next ``step``. Adapters are merged into them."""
        return self.policy.weights()

    def adapter(self) -> wire.Adapter | None:
        """What an offer of ``factors`` says of them; None: there are none, or the whole model is sent (``train.lora.send``)."""
        return None if self.policy.adapters is None or not self._base_digest else self.policy.adapters.shown(self._base_digest)

    def factors(self) -> Mapping[str, Tensor]:
        """The adapters' live factors by peft's names, whole; empty without adapters."""
        return self._factors()

    def logprobs(self, token_ids: Sequence[int] | npt.NDArray[np.generic]) -> Tensor:
        """log p(token[i + 1] | token[: i + 1]) at temperature 1 by a server, (n - 1,) float32 on the CPU."""
        with as_sent(self.policy) if self._rounds else nullcontext():
            return self.policy.logprobs(torch.tensor(np.asarray(token_ids, np.int64), device=self.device)).cpu()

    def snapshot(self) -> Snapshot:
        """Copies of the weights and of all else that the next step depends on; all that training waits for."""
        return Snapshot(self._all_weights(), self.state())

    def _all_weights(self) -> dict[str, Tensor]:
        """Copies of the weights, and of the adapters by peft's names."""
        parts = (self.weights(), self._factors())
        return {name: tensor.to("cpu", copy=True).contiguous() for part in parts for name, tensor in part.items()}

    def _factors(self) -> dict[str, Tensor]:
        """The adapters by peft's names; of a sharded backend, whole."""
        return {} if self.policy.adapters is None else self.policy.adapters.factors(self.policy.tensors().__getitem__)

    def save(self, path: str | Path, weights: Mapping[str, Tensor] | None = None) -> None:
        """Write a snapshot's weights, configuration and tokenizer to a folder that transformers loads; from any thread.

        Without ``weights`` it is those of now, and training must stand still. Adapters are merged in, and stand beside it for peft.
        """
        weights = self._all_weights() if weights is None else weights
        merged = {name: tensor for name, tensor in weights.items() if not name.startswith(PREFIX)}
        self.policy.module.save_pretrained(path, state_dict=merged)
        copy_tokenizer(self._first_path, Path(path))
        if self.policy.adapters is not None:
            self.policy.adapters.save(Path(path) / FOLDER, {name: weights[name] for name in weights.keys() - merged.keys()})

    def state(self) -> dict[str, Tensor]:
        """Copies of all else that the next step depends on: optimizer, schedule, RNG; CPU tensors, fit for safetensors."""
        if self._counts.rows:
            raise RuntimeError("a step is under way; its state is taken before or after")
        state = {f"optimizer.{name}": tensor for name, tensor in self._optimizer.state().items()}
        state |= {"version": torch.tensor(self._version), "kl_coef": torch.tensor(self._kl.value, dtype=torch.float64)}
        if self._critic is not None:
            state |= {f"critic.{name}": tensor for name, tensor in self._critic.state().items()}
        state["rng.cpu"] = torch.get_rng_state()
        if self.device.type == "cuda":
            state["rng.cuda"] = torch.cuda.get_rng_state(self.device)
        return state

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take back what ``state`` gave; a GPU's RNG only where there is one.

        Raises:
            UserError: it belongs to another model.
        """
        self._load_optimizer(_below("optimizer.", state))
        if self._critic is not None:
            self._load_critic(_below("critic.", state))
        self._version = int(state["version"])
        if self._kl.target is not None:
            self._kl.value = float(state["kl_coef"])
        torch.set_rng_state(state["rng.cpu"])
        if self.device.type == "cuda" and "rng.cuda" in state:
            torch.cuda.set_rng_state(state["rng.cuda"], self.device)

    def _make_optimizer(self, train: TrainSection) -> Optimizer:
        return Optimizer(_trained(self.policy.module), train)

    def _load_optimizer(self, state: Mapping[str, Tensor]) -> None:
        self._optimizer.load_state(state)

    def _load_critic(self, state: Mapping[str, Tensor]) -> None:
        assert self._critic is not None
        self._critic.load_state(state)

    @property
    def _kl_in_loss(self) -> bool:
        return self._ref is not None and not kl_in_reward(self._algorithm)

    def _can_pack(self, wanted: str, *models: Policy | Base | Critic | None) -> bool:
        """Whether all of the models take packed rows.

        Raises:
            ConfigError: one does not, and packing was insisted on.
        """
        problem = next((model.unpackable for model in models if model is not None and model.unpackable), "")
        if problem and wanted == "packed":
            raise ConfigError("train.packing", wanted, f"{self.policy.path} is not exact in packed rows ({problem}): auto or padded")
        if problem:
            log.info("rows are padded, not packed: %s", problem)
        return not problem


def _trained(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def _below(prefix: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


def _check(algorithm: AlgorithmSection, model: ModelSection, max_length: int | None) -> None:
    if model.dtype == "float16":
        raise ConfigError("model.dtype", model.dtype, "the torch backend trains in float32 or bfloat16")
    if algorithm.dual_clip is not None and algorithm.dual_clip <= 1:
        raise ConfigError("algorithm.dual_clip", algorithm.dual_clip, "it bounds the ratio from above and must exceed 1; 3 is usual")
    if algorithm.loss_agg_mode == "seq-mean-token-sum-norm" and max_length is None:
        raise ConfigError("algorithm.loss_agg_mode", algorithm.loss_agg_mode, "it needs a maximum length")
