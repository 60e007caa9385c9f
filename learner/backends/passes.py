"""Forward and backward passes of one rank through its models, a slice of samples at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from learner.algorithm.kl import KlCoefficient, kl_penalty
from learner.algorithm.losses.teacher import candidate_divergence
from learner.algorithm.packing import by_length, by_prefix, num_distinct_tokens
from learner.algorithm.samples import Array, TrainSample
from learner.algorithm.teaching import trains_divergence
from learner.algorithm.token_figures import TokenFigures
from learner.backends.activation_offload import activations_in_host_memory
from learner.backends.context import RunContext
from learner.backends.models.batch import TokenBatch, collate_samples
from learner.backends.models.model_set import ModelSet
from learner.backends.models.token_scores import token_energies
from learner.backends.objective import PolicyObjective
from learner.backends.optimizer import MasterOptimizer
from learner.backends.ranks.dealing import Job

# On a CPU, larger slices only pad more and exceed the cache.
CPU_SLICE_TOKENS: Final = 2048

Numerator = Callable[[Sequence[TrainSample], TokenBatch], tuple[Tensor, dict[str, Tensor]]]


class ModelPasses:
    """Runs slices through the models and adds to the gradients.

    Args:
        rank: of this process; dropout differs between ranks.
        saving: context of a forward pass that is trained: where activations wait for the backward
            pass.

    Attributes:
        packs: whether slices become packed rows.
        version: steps completed, over all incarnations.
        seed: of dropout.
        kl: weight of the divergence from the reference.
        scores_energies: whether ``score`` also measures the tokens' energies.
        numerator: what is minimised, before it is divided, and sums for the metrics.
        recorded: if not None, each slice's samples, log ratios and entropies are added to it, (T,)
            each.
    """

    def __init__(
        self,
        context: RunContext,
        models: ModelSet,
        optimizer: MasterOptimizer,
        device: torch.device,
        *,
        rank: int = 0,
        saving: Callable[[], AbstractContextManager[Any]] | None = None,
    ) -> None:
        algorithm = context.algorithm
        tokens = context.train.micro_batch_tokens
        self.algorithm = algorithm
        self.models = models
        self.optimizer = optimizer
        self.device = device
        self.packs = models.packs
        self.version = 0
        self.kl = KlCoefficient(algorithm.kl_coef, algorithm.kl_target, algorithm.kl_horizon)
        self.objective = PolicyObjective(algorithm)
        self.scores_energies = False
        self.saving = saving or partial(
            activations_in_host_memory, context.train.activation_offload
        )
        self.numerator: Numerator = self._policy_loss
        self.recorded: list[tuple[Sequence[TrainSample], Tensor, Tensor]] | None = None
        self._slice_tokens = min(tokens, CPU_SLICE_TOKENS) if device.type == "cpu" else tokens
        self.seed = context.seed
        self.rank = rank
        # The version for which seeds were drawn last, and how many.
        self._drawn = (0, 0)

    def slices(
        self, samples: Sequence[TrainSample], num_at_once: int = 1
    ) -> list[list[TrainSample]]:
        """Cut samples into slices that go through a model at once.

        Args:
            num_at_once: slices that are worked on at the same time; where there are fewer, they are
                cut smaller.
        """
        slices = self._cut(samples, self._slice_tokens)
        if (
            num_at_once == 1
            or not slices
            or len(slices) >= num_at_once
            or len(samples) <= len(slices)
        ):
            return slices
        if self.packs:
            size = num_distinct_tokens(samples)
        else:
            size = sum(sample.num_inputs for sample in samples)
        budget = -(-size // num_at_once)
        return self._cut(samples, min(budget, self._slice_tokens))

    def _cut(self, samples: Sequence[TrainSample], budget: int) -> list[list[TrainSample]]:
        if self.packs:
            return by_prefix(samples, budget)
        return by_length(samples, budget)

    def collate(self, samples: Sequence[TrainSample]) -> TokenBatch:
        """Return the tensors of a slice."""
        with_observed = self.algorithm.echo_coef > 0
        return collate_samples(samples, self.device, packed=self.packs, with_observed=with_observed)

    def run(self, jobs: Sequence[Job]) -> list[dict[str, float]]:
        """Run each slice forward, and backward where it is trained; return its sums."""
        return [self.run_one(samples, train=train) for samples, train in jobs]

    def run_one(self, samples: Sequence[TrainSample], *, train: bool) -> dict[str, float]:
        """Run one slice; return its sums."""
        batch = self.collate(samples)
        adapters = self.models.policy.adapters
        with adapters.dropping(self.draw_seed) if train and adapters is not None else nullcontext():
            with torch.set_grad_enabled(train), self.saving() if train else nullcontext():
                total, sums = self.numerator(samples, batch)
            if train:
                self.optimizer.backward(total)
                self.optimizer.collect()
        return self.sums_of(batch, sums)

    def run_critic(self, jobs: Sequence[Job]) -> list[dict[str, float]]:
        """Run each slice forward and backward through the critic; return its sums."""
        assert self.models.critic is not None
        return [self.models.critic.forward_backward(self.collate(samples)) for samples, _ in jobs]

    @torch.no_grad()
    def score(self, jobs: Sequence[Job]) -> list[list[Array | None]]:
        """Return each slice's logprobs, divergence, values and energies, None if not needed."""
        return [self._score(samples) for samples, _ in jobs]

    def _score(self, samples: Sequence[TrainSample]) -> list[Array | None]:
        batch = self.collate(samples)
        models = self.models
        energies = None
        if self.scores_energies:
            columns = [batch.targets]
            if batch.temperature is not None:
                columns.append(batch.temperature)
            logprobs, energies = models.policy.map_logits(batch, token_energies, *columns)
        else:
            logprobs, _ = models.policy.score(batch)
        kl = None
        values = None
        if models.critic is not None:
            values = models.critic.values(batch)
        if models.ref is not None and models.kl_in_reward:
            reference, _ = models.ref.score(batch)
            kl = kl_penalty(logprobs, reference, self.algorithm.kl_estimator)
        scores = (logprobs, kl, values, energies)
        return [None if column is None else column.cpu().numpy() for column in scores]

    def discard(self) -> None:
        """Drop the gradient, and draw the same seeds again."""
        self.optimizer.discard()
        self._drawn = (0, 0)
        self.take_recorded()

    @torch.no_grad()
    def take_recorded(self) -> dict[int, TokenFigures]:
        """Return what was recorded since the last call, by the samples' ids.

        Of each sample the first pass counts.
        """
        if not self.recorded:
            return {}
        slices = self.recorded
        self.recorded = []
        samples = [sample for part, _, _ in slices for sample in part]
        columns = [
            torch.cat(column).half().cpu().numpy() for column in list(zip(*slices, strict=True))[1:]
        ]
        ends = np.cumsum([sample.num_tokens for sample in samples])[:-1]
        log_ratios, entropies = (np.split(column, ends) for column in columns)
        figures: dict[int, TokenFigures] = {}
        for sample, log_ratio, entropy in zip(samples, log_ratios, entropies, strict=True):
            figures.setdefault(id(sample), TokenFigures(entropy, log_ratio))
        return figures

    def sums_of(self, batch: TokenBatch, sums: Mapping[str, Tensor]) -> dict[str, float]:
        """Return a slice's sums as numbers, with its counts."""
        # One transfer to the host for all of them.
        values = torch.stack([value.detach().double() for value in sums.values()]).tolist()
        counts = {
            "tokens": len(batch.targets),
            "rows": batch.num_rows,
            "padded": batch.input_ids.numel(),
        }
        return {name: float(count) for name, count in counts.items()} | dict(
            zip(sums, values, strict=True)
        )

    def draw_seed(self) -> int:
        """Return a seed for one slice's dropout.

        It is the same after a resume or in a repeated step, and another one on each rank.
        """
        version, count = self._drawn
        self._drawn = (self.version, count + 1 if version == self.version else 1)
        return int(
            np.random.SeedSequence((self.seed, *self._drawn, self.rank)).generate_state(1)[0]
        )

    def _policy_loss(
        self, samples: Sequence[TrainSample], batch: TokenBatch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        # Before the policy's pass, which keeps its activations.
        reference = self._reference(batch)
        has_entropy = self.algorithm.entropy_coef > 0
        divergence = None
        scored = batch.with_observed()
        if batch.teacher_top_ids is not None and trains_divergence(self.algorithm):
            assert batch.teacher_top_logprobs is not None
            compare = partial(candidate_divergence, direction=self.algorithm.distillation.kl)
            columns = (batch.teacher_top_ids, batch.teacher_top_logprobs)
            logprobs, entropy, divergence = self.models.policy.score_and_map(
                scored, compare, columns, entropy_grad=has_entropy
            )
        else:
            logprobs, entropy = self.models.policy.score(scored, entropy_grad=has_entropy)
        num_tokens = len(batch.targets)
        observed_logprobs = logprobs[num_tokens:]
        logprobs = logprobs[:num_tokens]
        entropy = entropy[:num_tokens]
        if self.recorded is not None:
            self.recorded.append(
                (samples, logprobs.detach() - batch.rollout_logprobs, entropy.detach())
            )
        return self.objective(
            batch,
            logprobs,
            entropy,
            reference,
            kl_coef=self.kl.value,
            version=self.version,
            divergence=divergence,
            observed_logprobs=observed_logprobs,
        )

    @torch.no_grad()
    def _reference(self, batch: TokenBatch) -> Tensor | None:
        if self.models.ref is not None and self.models.kl_in_loss:
            return self.models.ref.score(batch)[0]
        return None
