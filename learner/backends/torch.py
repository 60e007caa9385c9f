"""One process, one device, plain torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from broker.errors import ConfigError, WireError
from broker.registry import resolve
from learner.aggregation import Counts, denominator, token_weights
from learner.backends.batch import Batch, collate
from learner.backends.optim import Optimizer
from learner.backends.policy import Policy, pick_device
from learner.config import AlgorithmSection, TrainSection
from learner.kl import kl_penalty
from learner.losses import LOSSES
from learner.losses.base import Loss, Tokens
from learner.losses.ratios import ratio_metrics, ratio_sums
from learner.packing import by_length
from learner.samples import TrainSample
from text.config import ModelSection
from text.hub import copy_tokenizer

_CPU_SLICE_TOKENS: Final = 2048  # padded tokens; larger slices pad more and fall out of the cache


class TorchBackend:
    """See ``learner.backends.base.Backend``. old_logprobs are the rollout's, so a step may start while it is still being generated."""

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
        if train.num_threads:
            torch.set_num_threads(train.num_threads)
        torch.manual_seed(seed)
        self._algorithm, self._max_length = algorithm, max_length
        self._loss: Loss = resolve("losses", algorithm.pg_variant, LOSSES)
        self.device = pick_device(train.device)
        self._slice_tokens = min(train.micro_batch_tokens, _CPU_SLICE_TOKENS if self.device.type == "cpu" else train.micro_batch_tokens)
        self.policy = Policy(model_path, model, self.device)
        self._ref = Policy(ref_path or model_path, model, self.device, trainable=False) if algorithm.kl_coef else None
        self._optimizer = Optimizer(dict(self.policy.module.named_parameters()), train)
        self._counts, self._sums = Counts(), dict[str, float]()

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return self.policy.vocab_size

    @property
    def updates(self) -> int:
        """Steps taken, over all incarnations."""
        return self._optimizer.updates

    def forward_backward(self, samples: Sequence[TrainSample]) -> dict[str, float]:
        """Add one micro-batch to the gradient of the step under way, not yet normalised.

        Returns:
            Sums over the micro-batch: ``tokens``, ``rows``, ``inputs``, ``pg_loss``, ``entropy`` and those of the loss's statistics.

        Raises:
            WireError: a token id that the model does not have; nothing is added then.
        """
        trained = [sample for sample in samples if sample.num_inputs]
        self._check_ids(trained)
        # Without a KL or entropy term a row whose advantages are all 0 adds nothing to the gradient: it is measured, not trained.
        idle = (
            [] if self._algorithm.kl_coef or self._algorithm.entropy_coef else [s for s in trained if not s.advantages[s.positions].any()]
        )
        skipped = {id(sample) for sample in idle}
        sums = {"tokens": 0.0, "rows": 0.0, "inputs": float(sum(sample.num_inputs for sample in trained))}
        for part in by_length([sample for sample in trained if id(sample) not in skipped], self._slice_tokens):
            _add(sums, self._run(part, train=True))
        for part in by_length(idle, self._slice_tokens):
            _add(sums, self._run(part, train=False))
        self._counts.add(sum(sample.num_tokens for sample in trained), len(trained))
        _add(self._sums, sums)
        return sums

    def step(self) -> dict[str, float]:
        """Normalise over all that was added since the last step, clip, update; the step's metrics by their published names."""
        scale = denominator(self._algorithm.loss_agg_mode, self._counts, self._max_length)
        done = self._optimizer.step(scale)
        metrics = self._metrics(scale) | {f"actor/{name}": value for name, value in done.items()}
        self._counts, self._sums = Counts(), dict[str, float]()
        return metrics

    def discard(self) -> None:
        """Forget what was added since the last step, as if the step under way had not begun."""
        self._optimizer.discard()
        self._counts, self._sums = Counts(), dict[str, float]()

    def weights(self) -> dict[str, Tensor]:
        """The live tensors by their state-dict names, tied ones once; they change at the next ``step``."""
        return self.policy.weights()

    def logprobs(self, token_ids: Sequence[int] | npt.NDArray[np.generic]) -> Tensor:
        """log p(token[i + 1] | token[: i + 1]) at temperature 1, (n - 1,) float32 on the CPU."""
        return self.policy.logprobs(torch.tensor(np.asarray(token_ids, np.int64), device=self.device)).cpu()

    def save(self, path: str | Path) -> None:
        """Write weights, configuration and tokenizer to a folder that transformers loads."""
        self.policy.module.save_pretrained(path)
        copy_tokenizer(self.policy.path, Path(path))

    def state(self) -> dict[str, Tensor]:
        """Copies of all else that the next step depends on: optimizer, schedule, RNG; CPU tensors, fit for safetensors."""
        if self._counts.rows:
            raise RuntimeError("a step is under way; its state is taken before or after")
        state = {f"optimizer.{name}": tensor for name, tensor in self._optimizer.state().items()}
        state["rng.cpu"] = torch.get_rng_state()
        if self.device.type == "cuda":
            state["rng.cuda"] = torch.cuda.get_rng_state(self.device)
        return state

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take back what ``state`` gave; a GPU's RNG only where there is one.

        Raises:
            UserError: it belongs to another model.
        """
        prefix = "optimizer."
        self._optimizer.load_state({name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)})
        torch.set_rng_state(state["rng.cpu"])
        if self.device.type == "cuda" and "rng.cuda" in state:
            torch.cuda.set_rng_state(state["rng.cuda"], self.device)

    def _run(self, samples: Sequence[TrainSample], *, train: bool) -> dict[str, float]:
        """One slice: forward, and backward if ``train``; its sums."""
        batch = collate(samples, self.device)
        with torch.set_grad_enabled(train):
            logprobs, entropy = self.policy.score(batch, entropy_grad=self._algorithm.entropy_coef > 0)
            total, sums = self._objective(batch, logprobs, entropy)
        if train:
            total.backward()  # type: ignore[no-untyped-call]
            self._optimizer.collect()
        sums |= ratio_sums(logprobs, batch.rollout_logprobs)
        names, values = list(sums), torch.stack([value.detach().double() for value in sums.values()]).tolist()  # one transfer
        counts = {"tokens": float(len(batch.targets)), "rows": float(batch.num_rows), "padded": float(batch.input_ids.numel())}
        return counts | dict(zip(names, values, strict=True))

    def _objective(self, batch: Batch, logprobs: Tensor, entropy: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The slice's share of the numerator of the loss, and sums for the metrics."""
        algorithm = self._algorithm
        tokens = Tokens(logprobs, batch.rollout_logprobs, batch.advantages, batch.sequence, batch.num_rows)
        losses, sums = self._loss(tokens, algorithm)
        weights = token_weights(algorithm.loss_agg_mode, batch.sequence, batch.num_rows)
        sums = {**sums, "pg_loss": (weights * losses).sum(), "entropy": entropy.sum()}
        sums["ppo_kl"] = (tokens.old_logprobs - logprobs).sum()
        if self._ref is not None:
            with torch.no_grad():
                ref_logprobs, _ = self._ref.score(batch)
            penalty = kl_penalty(logprobs, ref_logprobs, algorithm.kl_estimator)
            losses = losses + algorithm.kl_coef * penalty
            sums["kl"] = penalty.sum()
        if algorithm.entropy_coef:
            losses = losses - algorithm.entropy_coef * entropy
        return (weights * losses).sum(), sums

    def _metrics(self, scale: float) -> dict[str, float]:
        sums, tokens = self._sums, self._counts.tokens
        mean = {name: sums.get(name, 0.0) / max(tokens, 1) for name in ("entropy", "ppo_kl", "clipped", "dual_clipped", "kl")}
        metrics = {
            "actor/pg_loss": sums.get("pg_loss", 0.0) / scale,
            "actor/entropy": mean["entropy"],
            "actor/ppo_kl": mean["ppo_kl"],
            "actor/pg_clipfrac": mean["clipped"],
            "actor/num_tokens": float(tokens),
            "actor/num_rows": float(self._counts.rows),
            "actor/num_input_tokens": sums.get("inputs", 0.0),
            "actor/num_padded_tokens": sums.get("padded", 0.0),
        }
        if self._algorithm.dual_clip is not None:
            metrics["actor/pg_clipfrac_lower"] = mean["dual_clipped"]
        if self._ref is not None:
            metrics["actor/kl_loss"] = mean["kl"]
        return metrics | ratio_metrics(sums, tokens)

    def _check_ids(self, samples: Sequence[TrainSample]) -> None:
        for sample in samples:
            largest = int(sample.token_ids.max())
            if largest >= self.vocab_size:
                raise WireError(f"group {sample.group}: token id {largest} is outside the model's vocabulary of {self.vocab_size}")


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
