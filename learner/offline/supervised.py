"""Runs ``rlearner sft``: maximum likelihood of the assistant's turns, with their end."""

from __future__ import annotations

import math
from collections.abc import Sequence

from learner.algorithm.samples import TrainSample
from learner.config import AlgorithmSection
from learner.offline.base import OfflineJob
from learner.offline.data import load_examples

SFT = AlgorithmSection(pg_variant="sft", loss_agg_mode="token-mean")


class SupervisedPipeline:
    """A ``Pipeline``; the loss of a step is the mean over all trained tokens of its rows."""

    def __init__(self, job: OfflineJob) -> None:
        most = job.max_tokens()

        def read(path: str, key: str) -> list[TrainSample]:
            return [example.sample() for example in load_examples(path, job.tokenizer, most, key)]

        self._rows, self._held_out = job.load(read)
        self.backend = job.make_backend(SFT)
        self.num_rows = len(self._rows)

    def step(self, rows: Sequence[int]) -> dict[str, float]:
        """Take an update; ``train/loss`` is in nats per trained token."""
        samples = [self._rows[row] for row in rows]
        return optimizer_metrics(self.backend.update(samples), samples)

    def evaluate(self) -> dict[str, float]:
        """Return ``eval/loss`` in nats per trained token, and its exponential, ``eval/perplexity``."""
        if not self._held_out:
            return {}
        found = self.backend.score(self._held_out)
        total = math.fsum(-float(one.logprobs.astype("f8").sum()) for one in found if one.logprobs is not None)
        loss = total / sum(sample.num_tokens for sample in self._held_out)
        return {"eval/loss": loss, "eval/perplexity": math.exp(min(loss, 700.0))}

    def close(self) -> None:
        """Do nothing."""


def optimizer_metrics(values: dict[str, float], samples: Sequence[TrainSample]) -> dict[str, float]:
    """Return those of a backend's metrics that apply offline."""
    return {
        "train/loss": values["actor/pg_loss"],
        "train/grad_norm": values["actor/grad_norm"],
        "train/lr": values["actor/lr"],
        "train/skipped": values["actor/skipped"],
        "train/tokens": float(sum(len(sample.token_ids) for sample in samples)),
        "train/trained_tokens": float(sum(sample.num_tokens for sample in samples)),
    }
