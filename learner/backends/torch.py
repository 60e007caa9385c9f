"""One process, one device, plain torch."""

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

from broker import wire
from broker.errors import ConfigError, WireError
from broker.weights.adapter import PREFIX, digest_of
from broker.weights.staging import plan_of
from learner.aggregation import Counts, denominator
from learner.backends.base import Snapshot
from learner.backends.batch import Batch, collate
from learner.backends.compiling import compile_blocks
from learner.backends.critic import Critic
from learner.backends.figures import average, figures
from learner.backends.lora import FOLDER, Base
from learner.backends.objective import Objective
from learner.backends.offload import activations_in_host_memory
from learner.backends.optim import Optimizer
from learner.backends.policy import Policy, pick_device
from learner.config import AlgorithmSection, TrainSection, kl_in_reward
from learner.kl import Coefficient, kl_penalty
from learner.packing import Cutter, by_length, cut, minibatches
from learner.samples import Array, Scores, TrainSample
from text.config import ModelSection
from text.hub import copy_tokenizer

log = logging.getLogger(__name__)

_CPU_SLICE_TOKENS: Final = 2048  # larger slices pad more and fall out of the cache


Job = tuple[Sequence[TrainSample], bool]  # a slice, and whether it is trained


class TorchBackend:
    """See ``learner.backends.base.Backend``."""

    takes_ranks = False

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
        self._base_digest = ""
        if train.lora is not None:
            if train.lora.send == "adapter" and getattr(self, "rank", 0) == 0:
                held = self.policy.weights()  # before there are adapters, and before ranks share them out
                self._base_digest = digest_of(plan_of(held, train.weights_bucket_mib, dtype=train.weights_dtype), held)
            adapters = self.policy.adapt(train.lora, seed)
            if model_path != first:
                adapters.load(Path(model_path) / FOLDER, self.policy.tensors().__getitem__)
        if train.gradient_checkpointing:
            self.policy.checkpoint_blocks()
        self._ref: Policy | Base | None = None
        if algorithm.kl_coef:
            self._ref = Base(self.policy) if train.lora else self._load(first, model, trainable=False, packing=packing)
        self._kl = Coefficient(algorithm.kl_coef, algorithm.kl_target, algorithm.kl_horizon)
        self._critic = Critic(first, algorithm.critic, train, model, self.device) if algorithm.critic.enabled else None
        self._packs = packing and self._can_pack(train.packing, self.policy, self._ref, self._critic)
        self._offload, self._drawn = train.activation_offload, (0, 0)
        if train.compile:
            for one in (self.policy, self._ref):
                if isinstance(one, Policy):
                    compile_blocks(one.module, self.device)
        self._version = 0
        self._optimizer = self._make_optimizer(train)
        self._counts, self._sums = Counts(), dict[str, float]()
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

    def cutter(self) -> Cutter[TrainSample]:
        """Cuts samples, in the order of the log, into micro-batches for ``forward_backward``."""
        return Cutter(self._micro_tokens, packed=self._packs)

    def close(self) -> None:
        """Nothing was started."""

    def forward_backward(self, samples: Sequence[TrainSample]) -> dict[str, float]:
        """Add one micro-batch to the gradient of the update under way, not yet normalised.

        Returns:
            Sums over the micro-batch: ``tokens``, ``rows``, ``inputs``, ``pg_loss``, ``entropy`` and those of the loss's statistics.

        Raises:
            WireError: a token id that the model does not have; nothing is added then.
        """
        trained = [sample for sample in samples if sample.num_inputs]
        self._check_ids(trained)
        # Without a KL or entropy term a row whose advantages are all 0 adds nothing to the gradient: it is measured, not trained.
        every_row = self._kl_in_loss or self._algorithm.entropy_coef > 0
        idle = [] if every_row else [s for s in trained if not s.advantages[s.positions].any()]
        skipped = {id(sample) for sample in idle}
        sums = {"tokens": 0.0, "rows": 0.0, "inputs": float(sum(sample.num_inputs for sample in trained))}
        jobs = [(part, True) for part in self._slices([sample for sample in trained if id(sample) not in skipped])]
        jobs += [(part, False) for part in self._slices(idle)]
        for found in self._run_all(jobs):
            _add(sums, found)
        self._counts.add(sum(sample.num_tokens for sample in trained), len(trained))
        _add(self._sums, sums)
        return sums

    def step(self) -> dict[str, float]:
        """One update over all that was added since the last step; the step's metrics by their published names."""
        num_rows = self._counts.rows
        return self._complete(self._take(), num_rows)

    def update(self, samples: Sequence[TrainSample]) -> dict[str, float]:
        """A whole step at once: ``num_epochs`` passes in ``num_minibatches`` updates each, the critic's beside the policy's.

        During the critic's warm-up the policy stays as it is. With more than one minibatch a pass takes the samples in an order drawn
        from the run's seed, the version and the pass, so that it is the same after a resume; with one in the order they come in.
        """
        rows = [sample for sample in samples if sample.num_inputs]
        self._check_ids(rows)
        trains_policy = self._critic is None or self._version >= self._algorithm.critic.warmup_steps
        done: list[dict[str, float]] = []
        for epoch in range(self._algorithm.num_epochs):
            for part in minibatches(rows, self._algorithm.num_minibatches, (self._seed, self._version, epoch)):
                done.append(self._update(part, trains_policy))
        metrics = average(done, self._algorithm.num_epochs) | {"actor/num_updates": float(len(done) if trains_policy else 0)}
        return self._complete(metrics, len(rows))

    def _update(self, part: Sequence[TrainSample], trains_policy: bool) -> dict[str, float]:
        found: dict[str, float] = {}
        if self._critic is not None:
            sums = dict[str, float]()
            for one in self._run_critic(self._slices(part)):
                _add(sums, one)
            found = self._critic_step(sums, self._version)
        if trains_policy:
            for micro in cut(part, self._micro_tokens, packed=self._packs):
                self.forward_backward(micro)
            found |= self._take()
        return found

    @torch.no_grad()
    def score(self, samples: Sequence[TrainSample]) -> list[Scores]:
        """What the models say about samples before the step: logprobs, divergence where it stands in the reward, values."""
        rows = [sample for sample in samples if sample.num_inputs]
        self._check_ids(rows)
        found: dict[int, Scores] = {}
        pieces = self._slices(rows)
        for piece, columns in zip(pieces, self._score_all(pieces), strict=True):
            ends = np.cumsum([sample.num_tokens for sample in piece])[:-1].tolist()
            parts = [[None] * len(piece) if column is None else np.split(column, ends) for column in columns]
            found |= {id(sample): Scores(*row) for sample, row in zip(piece, zip(*parts, strict=True), strict=True)}
        kl = [scores.kl for scores in found.values() if scores.kl is not None]
        self._reward_kl = float(np.concatenate(kl).mean()) if kl else None
        empty = np.zeros(0, np.float32)
        nothing = Scores(empty, None if self._kl_in_loss or self._ref is None else empty, None if self._critic is None else empty)
        return [found.get(id(sample), nothing) for sample in samples]

    def _score_all(self, pieces: Sequence[Sequence[TrainSample]]) -> list[list[Array | None]]:
        """Of each piece: logprobs, divergence, values, over its trained tokens."""
        return [self._score(piece) for piece in pieces]

    @torch.no_grad()
    def _score(self, piece: Sequence[TrainSample]) -> list[Array | None]:
        batch = self._collate(piece)
        logprobs, _ = self.policy.score(batch)
        columns = [logprobs, None, self._critic.values(batch) if self._critic is not None else None]
        if self._ref is not None and not self._kl_in_loss:
            columns[1] = kl_penalty(logprobs, self._ref.score(batch)[0], self._algorithm.kl_estimator)
        return [None if column is None else column.cpu().numpy() for column in columns]

    @property
    def _kl_in_loss(self) -> bool:
        return self._ref is not None and not kl_in_reward(self._algorithm)

    def _take(self) -> dict[str, float]:
        """One update of the policy; its metrics."""
        scale = denominator(self._algorithm.loss_agg_mode, self._counts, self._max_length)
        done = self._optimizer_step(scale, self._version)
        metrics = figures(self._sums, self._counts, scale, self._algorithm) | {f"actor/{name}": value for name, value in done.items()}
        self._counts, self._sums = Counts(), dict[str, float]()
        return metrics

    def _complete(self, metrics: dict[str, float], num_rows: int) -> dict[str, float]:
        """The step is over."""
        if self._ref is not None:
            metrics["actor/kl_coef"] = self._kl.value
            if self._reward_kl is not None:
                metrics["actor/reward_kl"] = self._reward_kl
            kl = metrics.get("actor/kl_loss", self._reward_kl)
            if kl is not None:
                self._kl.update(kl, num_rows)
        self._version, self._reward_kl = self._version + 1, None
        return metrics

    def discard(self) -> None:
        """Forget what was added since the last step, as if the step under way had not begun."""
        self._optimizer.discard()
        self._counts, self._sums, self._drawn = Counts(), dict[str, float](), (0, 0)

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
        """log p(token[i + 1] | token[: i + 1]) at temperature 1, (n - 1,) float32 on the CPU."""
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

    def _critic_step(self, sums: Mapping[str, float], at: int) -> dict[str, float]:
        assert self._critic is not None
        return self._critic.step(sums, at)

    def _run_critic(self, pieces: Sequence[Sequence[TrainSample]]) -> list[dict[str, float]]:
        """Forward and backward; the sums of each slice, in order."""
        assert self._critic is not None
        return [self._critic.forward_backward(self._collate(piece)) for piece in pieces]

    def _optimizer_step(self, denominator: float, at: int) -> dict[str, float]:
        return self._optimizer.step(denominator, at)

    def _run_all(self, jobs: Sequence[Job]) -> list[dict[str, float]]:
        """The sums of each slice, in order."""
        return [self._run(part, train=train) for part, train in jobs]

    def _run(self, samples: Sequence[TrainSample], *, train: bool) -> dict[str, float]:
        """One slice: forward, and backward if ``train``; its sums."""
        batch = self._collate(samples)
        adapters = self.policy.adapters
        with adapters.dropping(self._draw) if train and adapters is not None else nullcontext():
            with torch.set_grad_enabled(train), activations_in_host_memory(train and self._offload):
                total, sums = self._numerator(samples, batch)
            if train:
                self._backward(total)
                self._optimizer.collect()
        return self._figures_of(batch, sums)

    def _figures_of(self, batch: Batch, sums: Mapping[str, Tensor]) -> dict[str, float]:
        values = torch.stack([value.detach().double() for value in sums.values()]).tolist()  # one transfer
        counts = {"tokens": float(len(batch.targets)), "rows": float(batch.num_rows), "padded": float(batch.input_ids.numel())}
        return counts | dict(zip(sums, values, strict=True))

    def _backward(self, total: Tensor) -> None:
        total.backward()  # type: ignore[no-untyped-call]

    def _draw(self) -> int:
        """A seed for the dropout of one slice: the same after a resume, and after a step that was begun again."""
        version, count = self._drawn
        self._drawn = (self._version, count + 1 if version == self._version else 1)
        return int(np.random.SeedSequence((self._seed, *self._drawn)).generate_state(1)[0])

    def _numerator(self, samples: Sequence[TrainSample], batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """What is minimised, before it is divided, and sums for the metrics."""
        reference = self._ref_logprobs(batch)  # first: the other pass keeps its activations
        logprobs, entropy = self.policy.score(batch, entropy_grad=self._algorithm.entropy_coef > 0)
        return self._objective(batch, logprobs, entropy, reference, kl_coef=self._kl.value, version=self._version)

    @torch.no_grad()
    def _ref_logprobs(self, batch: Batch) -> Tensor | None:
        return self._ref.score(batch)[0] if self._ref is not None and self._kl_in_loss else None

    def _slices(self, samples: Sequence[TrainSample]) -> list[list[TrainSample]]:
        """What goes through the model at once."""
        return by_length(samples, self._slice_tokens, packed=self._packs)

    def _collate(self, samples: Sequence[TrainSample]) -> Batch:
        return collate(samples, self.device, packed=self._packs)

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

    def _check_ids(self, samples: Sequence[TrainSample]) -> None:
        for sample in samples:
            largest = int(sample.token_ids.max())
            if largest >= self.vocab_size:
                raise WireError(f"group {sample.group}: token id {largest} is outside the model's vocabulary of {self.vocab_size}")


def _trained(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def _below(prefix: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


def _add(into: dict[str, float], values: Mapping[str, float]) -> None:
    for name, value in values.items():
        into[name] = into.get(name, 0.0) + value


def _check(algorithm: AlgorithmSection, model: ModelSection, max_length: int | None) -> None:
    if model.dtype == "float16":
        raise ConfigError("model.dtype", model.dtype, "the torch backend trains in float32 or bfloat16")
    if algorithm.dual_clip is not None and algorithm.dual_clip <= 1:
        raise ConfigError("algorithm.dual_clip", algorithm.dual_clip, "it bounds the ratio from above and must exceed 1; 3 is usual")
    if algorithm.loss_agg_mode == "seq-mean-token-sum-norm" and max_length is None:
        raise ConfigError("algorithm.loss_agg_mode", algorithm.loss_agg_mode, "it needs a maximum length")
