"""One process, one device, plain torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from broker.errors import WireError
from learner.algorithm.aggregation import BatchCounts, denominator
from learner.algorithm.kl import kl_penalty
from learner.algorithm.packing import MicroBatchCutter, by_length, cut, minibatches
from learner.algorithm.samples import Array, SampleScores, TrainSample
from learner.backends.batch import Batch, collate
from learner.backends.figures import average, figures
from learner.backends.held import Held
from learner.backends.offload import activations_in_host_memory
from learner.backends.ranks.dealing import Job


class TorchBackend(Held):
    """See ``learner.backends.base.Backend``."""

    def cutter(self) -> MicroBatchCutter[TrainSample]:
        """Cuts samples, in the order of the log, into micro-batches for ``forward_backward``."""
        return MicroBatchCutter(self._micro_tokens, packed=self._packs)

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
            for micro in cut(part, self.cutter().budget, packed=self._packs):
                self.forward_backward(micro)
            found |= self._take()
        return found

    @torch.no_grad()
    def score(self, samples: Sequence[TrainSample]) -> list[SampleScores]:
        """What the models say about samples before the step: logprobs, divergence where it stands in the reward, values."""
        rows = [sample for sample in samples if sample.num_inputs]
        self._check_ids(rows)
        found: dict[int, SampleScores] = {}
        pieces = self._slices(rows)
        for piece, columns in zip(pieces, self._score_all(pieces), strict=True):
            ends = np.cumsum([sample.num_tokens for sample in piece])[:-1].tolist()
            parts = [[None] * len(piece) if column is None else np.split(column, ends) for column in columns]
            found |= {id(sample): SampleScores(*row) for sample, row in zip(piece, zip(*parts, strict=True), strict=True)}
        kl = [scores.kl for scores in found.values() if scores.kl is not None]
        self._reward_kl = float(np.concatenate(kl).mean()) if kl else None
        empty = np.zeros(0, np.float32)
        nothing = SampleScores(empty, None if self._kl_in_loss or self._ref is None else empty, None if self._critic is None else empty)
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

    def _take(self) -> dict[str, float]:
        """One update of the policy; its metrics."""
        scale = denominator(self._algorithm.loss_agg_mode, self._counts, self._max_length)
        done = self._optimizer_step(scale, self._version)
        metrics = figures(self._sums, self._counts, scale, self._algorithm) | {f"actor/{name}": value for name, value in done.items()}
        self._counts, self._sums = BatchCounts(), dict[str, float]()
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
        self._counts, self._sums, self._drawn = BatchCounts(), dict[str, float](), (0, 0)

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
            with torch.set_grad_enabled(train), self._saving(train):
                total, sums = self._numerator(samples, batch)
            if train:
                self._backward(total)
                self._optimizer.collect()
        return self._figures_of(batch, sums)

    def _saving(self, train: bool) -> AbstractContextManager[Any]:
        """Around a forward pass: where what the backward pass needs waits for it."""
        return activations_in_host_memory(train and self._offload)

    def _figures_of(self, batch: Batch, sums: Mapping[str, Tensor]) -> dict[str, float]:
        values = torch.stack([value.detach().double() for value in sums.values()]).tolist()  # one transfer
        counts = {"tokens": float(len(batch.targets)), "rows": float(batch.num_rows), "padded": float(batch.input_ids.numel())}
        return counts | dict(zip(sums, values, strict=True))

    def _backward(self, total: Tensor) -> None:
        total.backward()  # type: ignore[no-untyped-call]

    def _draw(self) -> int:
        """A seed for the dropout of one slice: the same after a resume, and after a step that was begun again; another on each rank."""
        version, count = self._drawn
        self._drawn = (self._version, count + 1 if version == self._version else 1)
        return int(np.random.SeedSequence((self._seed, *self._drawn, self.rank)).generate_state(1)[0])

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

    def _check_ids(self, samples: Sequence[TrainSample]) -> None:
        for sample in samples:
            largest = int(sample.token_ids.max())
            if largest >= self.vocab_size:
                raise WireError(f"group {sample.group}: token id {largest} is outside the model's vocabulary of {self.vocab_size}")


def _add(into: dict[str, float], values: Mapping[str, float]) -> None:
    for name, value in values.items():
        into[name] = into.get(name, 0.0) + value
