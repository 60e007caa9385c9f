"""Runs ``rlearner dpo``: preference losses on pairs of answers, against a frozen reference.

A preference loss couples two sequences, but a backend takes each separately. So a step scores all
its answers first, takes the derivative of the loss by the logprob of each answer, and passes it to
the backend as the weight of that answer's tokens in a likelihood loss: the gradient is exactly that
of the preference loss, however the batch is cut or packed, for one more forward pass. With
``train.lora.dropout`` it is not exact: scores are taken without dropout.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Final

import numpy as np
import torch
from torch import Tensor

from broker.errors import UserError
from broker.settings.registry import resolve
from broker.system.private_files import draft_of, private_folder
from learner.algorithm.losses.preference import PairLogprobs, PreferenceLoss
from learner.algorithm.samples import TrainSample
from learner.backends.base import Backend
from learner.config import AlgorithmSection
from learner.offline import PREFERENCES
from learner.offline.base import REFERENCE, OfflineJob, log
from learner.offline.config import DpoSection, DpoSettings
from learner.offline.preference_pairs import load_pairs, read_pair
from learner.offline.supervised import optimizer_metrics
from rlearner_text.rows.sources import DataSource

LIKELIHOOD: Final = AlgorithmSection(pg_variant="sft", loss_agg_mode="seq-mean-token-sum")
SamplePair = tuple[TrainSample, TrainSample]


def answer_logprobs(backend: Backend, pairs: Sequence[SamplePair]) -> Tensor:
    """Return the logprobs of both answers of each pair, summed over tokens, (P, 2) float64."""
    scores = backend.score([sample for pair in pairs for sample in pair])
    sums = [
        float(score.logprobs.astype(np.float64).sum())
        for score in scores
        if score.logprobs is not None
    ]
    return torch.tensor(sums, dtype=torch.float64).reshape(-1, 2)


def compare_pairs(
    loss: PreferenceLoss, beta: float, logprobs: Tensor, ref: Tensor, pairs: Sequence[SamplePair]
) -> tuple[Tensor, Tensor]:
    """Return losses and margins, (P,) each, with gradient for ``logprobs``, (P, 2) like ``ref``."""
    counts = torch.tensor(
        [[sample.num_tokens for sample in pair] for pair in pairs], dtype=torch.float64
    )
    chosen, rejected = logprobs.unbind(1)
    ref_chosen, ref_rejected = ref.unbind(1)
    chosen_tokens, rejected_tokens = counts.unbind(1)
    pair_logprobs = PairLogprobs(
        chosen=chosen,
        rejected=rejected,
        ref_chosen=ref_chosen,
        ref_rejected=ref_rejected,
        chosen_tokens=chosen_tokens,
        rejected_tokens=rejected_tokens,
    )
    return loss(pair_logprobs, beta)


def weight_answers(pairs: Sequence[SamplePair], slopes: Tensor) -> list[TrainSample]:
    """Return the answers, with tokens weighted by minus the derivative of the mean loss, (P, 2).

    The weights are multiplied by the number of answers, by which ``seq-mean-token-sum`` divides.
    """
    weights = (-slopes * 2 * len(pairs)).tolist()
    return [
        replace(sample, advantages=sample.loss_mask.astype(np.float32) * np.float32(weight))
        for pair, row in zip(pairs, weights, strict=True)
        for sample, weight in zip(pair, row, strict=True)
    ]


def summarize_pairs(
    prefix: str, losses: Tensor, margins: Tensor, *, logprobs: Tensor, ref: Tensor, beta: float
) -> dict[str, float]:
    """Return means over pairs; the implicit rewards are ``beta (log p - log ref)``."""
    rewards = beta * (logprobs - ref).mean(0)
    return {
        f"{prefix}/loss": losses.mean().item(),
        f"{prefix}/reward_margin": margins.mean().item(),
        f"{prefix}/accuracy": (margins > 0).double().mean().item(),
        f"{prefix}/chosen_reward": rewards[0].item(),
        f"{prefix}/rejected_reward": rewards[1].item(),
    }


class PreferencePipeline:
    """Training with a preference loss."""

    def __init__(self, job: OfflineJob[DpoSettings]) -> None:
        settings = job.settings.dpo
        self._beta = settings.beta
        self._loss: PreferenceLoss = resolve("preferences", settings.loss, PREFERENCES)
        if settings.label_smoothing:
            self._loss = partial(self._loss, label_smoothing=settings.label_smoothing)
        max_tokens = job.max_tokens()

        def read(source: DataSource, key: str) -> list[SamplePair]:
            columns = job.settings.data.columns
            pairs, _ = load_pairs(
                source,
                job.tokenizer,
                max_tokens,
                key,
                columns=columns,
                row_filter=job.make_filter(key, read_pair),
            )
            return [(pair.chosen.sample(), pair.rejected.sample()) for pair in pairs]

        self._rows, self._held_out = job.load(read)
        self.num_rows = len(self._rows)
        self._ref, self._ref_held_out = _reference_logprobs(
            job, settings, self._rows, self._held_out
        )
        self.backend = job.make_backend(LIKELIHOOD)

    def step(self, rows: Sequence[int]) -> dict[str, float]:
        """Take an update; ``train/loss`` is the mean over pairs."""
        pairs = [self._rows[row] for row in rows]
        ref = self._ref[list(rows)]
        logprobs = answer_logprobs(self.backend, pairs).requires_grad_()
        losses, margins = compare_pairs(self._loss, self._beta, logprobs, ref, pairs)
        (slopes,) = torch.autograd.grad(losses.mean(), logprobs)
        samples = weight_answers(pairs, slopes)
        metrics = optimizer_metrics(self.backend.update(samples), samples)
        return metrics | summarize_pairs(
            "train",
            losses.detach(),
            margins.detach(),
            logprobs=logprobs.detach(),
            ref=ref,
            beta=self._beta,
        )

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Return the metrics of the held-out pairs."""
        if not self._held_out:
            return {}
        logprobs = answer_logprobs(self.backend, self._held_out)
        losses, margins = compare_pairs(
            self._loss, self._beta, logprobs, self._ref_held_out, self._held_out
        )
        return summarize_pairs(
            "eval",
            losses,
            margins,
            logprobs=logprobs,
            ref=self._ref_held_out,
            beta=self._beta,
        )

    def close(self) -> None:
        """Do nothing."""


def _reference_logprobs(
    job: OfflineJob[DpoSettings],
    dpo: DpoSection,
    rows: Sequence[SamplePair],
    held_out: Sequence[SamplePair],
) -> tuple[Tensor, Tensor]:
    """Return the reference's logprobs of every answer, (rows, 2) float64 each.

    They are cached in the run's folder, so no second model stays in memory, and a resumed run
    compares with the same numbers.

    Raises:
        UserError: if the data changed since the run was started.
    """
    settings = job.settings
    cache_file = job.folder / REFERENCE
    digests = json.dumps(list(settings.data.digests().values()))
    from safetensors import safe_open
    from safetensors.torch import save_file

    if cache_file.exists():
        with safe_open(str(cache_file), "pt") as cached:
            if (cached.metadata() or {}).get("data") != digests:
                problem = (
                    f"data.train or data.eval changed since run {settings.run.name} was started"
                )
                raise UserError(f"{problem}; choose another run.name")
            return cached.get_tensor("train"), cached.get_tensor("eval")
    log.info("scoring %d answers under the reference", 2 * (len(rows) + len(held_out)))
    backend = job.make_backend(LIKELIHOOD, path=dpo.reference or job.first_path)
    train = answer_logprobs(backend, rows)
    evaluated = answer_logprobs(backend, held_out) if held_out else torch.zeros(0, 2)
    with draft_of(private_folder(job.folder) / REFERENCE) as draft:
        save_file({"train": train, "eval": evaluated}, str(draft), metadata={"data": digests})
    return train, evaluated
