"""Runs ``rlearner rm``: a reward model learns which answer of a pair is preferred.

Like a preference loss, the Bradley-Terry loss couples two sequences. Its derivative by each score
is passed to the backend as the weight of that score, see ``learner.offline.preference``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from learner.algorithm.losses.bradley_terry import bradley_terry
from learner.backends.models.reward_model import make_classifier
from learner.backends.reward import RewardBackend
from learner.offline.base import CLASSIFIER_FOLDER, OfflineJob
from learner.offline.config import RewardModelSettings, backend_train
from learner.offline.preference import (
    LIKELIHOOD,
    SamplePair,
    answer_logprobs,
    summarize_pairs,
    weight_answers,
)
from learner.offline.preference_pairs import load_pairs, read_pair
from learner.offline.reward_pairs import encode_whole, sample_pair
from learner.offline.supervised import optimizer_metrics
from rlearner_text.rows.sources import DataSource


class RewardModelPipeline:
    """Training of a reward model; a step's loss is the mean over its pairs."""

    def __init__(self, job: OfflineJob[RewardModelSettings]) -> None:
        settings = job.settings
        self._center = settings.rm.center
        max_tokens = job.max_tokens()

        def read(source: DataSource, key: str) -> list[SamplePair]:
            columns = settings.data.columns
            pairs, _ = load_pairs(
                source,
                job.tokenizer,
                max_tokens,
                key,
                columns=columns,
                encode=encode_whole,
                row_filter=job.make_filter(key, read_pair),
            )
            return [sample_pair(pair) for pair in pairs]

        self._rows, self._held_out = job.load(read)
        self.num_rows = len(self._rows)
        job = start_from_classifier(job)
        self.backend = RewardBackend(
            job.model_path,
            train=backend_train(settings.train),
            algorithm=LIKELIHOOD,
            model=settings.model,
            seed=settings.run.seed,
            ref_path=job.first_path,
            max_context=max_tokens,
        )

    def step(self, rows: Sequence[int]) -> dict[str, float]:
        """Take an update; ``train/loss`` is the mean over pairs."""
        pairs = [self._rows[row] for row in rows]
        scores = answer_logprobs(self.backend, pairs).requires_grad_()
        losses, margins = bradley_terry(scores, self._center)
        (slopes,) = torch.autograd.grad(losses.mean(), scores)
        samples = weight_answers(pairs, slopes)
        metrics = optimizer_metrics(self.backend.update(samples), samples)
        return metrics | _summarize(
            "train", losses=losses.detach(), margins=margins.detach(), scores=scores.detach()
        )

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Return the metrics of the held-out pairs."""
        if not self._held_out:
            return {}
        scores = answer_logprobs(self.backend, self._held_out)
        losses, margins = bradley_terry(scores, self._center)
        return _summarize("eval", losses=losses, margins=margins, scores=scores)

    def close(self) -> None:
        """Do nothing."""


def start_from_classifier(job: OfflineJob[RewardModelSettings]) -> OfflineJob[RewardModelSettings]:
    """Return the job with a classifier as its first model.

    Raises:
        ConfigError: if the model cannot become a classifier with one label.
    """
    first_path = make_classifier(
        job.first_path,
        job.folder / CLASSIFIER_FOLDER,
        job.settings.model,
        pad_token_id=job.tokenizer.pad_token_id,
    )
    is_first = job.model_path == job.first_path
    return replace(
        job, first_path=first_path, model_path=first_path if is_first else job.model_path
    )


def _summarize(
    part: str, *, losses: torch.Tensor, margins: torch.Tensor, scores: torch.Tensor
) -> dict[str, float]:
    """Return means over pairs, under the names of preference training: rewards are scores."""
    return summarize_pairs(
        part, losses, margins, logprobs=scores, ref=torch.zeros_like(scores), beta=1.0
    )
