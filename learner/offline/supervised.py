"""Supervised fine-tuning: maximum likelihood of the assistant's turns, with their end.

``rlearner sft`` runs the pipeline, the warm start of a run the function; both take the same steps.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from learner.algorithm.samples import TrainSample
from learner.backends.base import Backend
from learner.config import AlgorithmSection
from learner.offline.base import OfflineJob, check_finite, longest_row
from learner.offline.config import OfflineSettings, OfflineTrainSection, backend_train
from learner.offline.data import load_examples, read_dialogue, shuffled_batches
from rlearner_text.atomic_folders import atomic_folder
from rlearner_text.config import ModelSection, check_model_path
from rlearner_text.rows.sources import DataSource
from rlearner_text.tokenizer import Tokenizer

OnStep = Callable[[int, dict[str, float]], None]

SFT = AlgorithmSection(pg_variant="sft", loss_agg_mode="token-mean")


class SupervisedPipeline:
    """Fine-tuning; a step's loss is the mean over the trained tokens of its rows."""

    def __init__(self, job: OfflineJob[OfflineSettings]) -> None:
        max_tokens = job.max_tokens()

        def read(source: DataSource, key: str) -> list[TrainSample]:
            columns = job.settings.data.columns
            row_filter = job.make_filter(key, lambda row: (read_dialogue(row),))
            examples = load_examples(
                source, job.tokenizer, max_tokens, key, columns=columns, row_filter=row_filter
            )
            return [example.sample() for example in examples]

        self._rows, self._held_out = job.load(read)
        self.backend = job.make_backend(SFT)
        self.num_rows = len(self._rows)

    def step(self, rows: Sequence[int]) -> dict[str, float]:
        """Take an update; ``train/loss`` is in nats per trained token."""
        return supervised_step(self.backend, [self._rows[row] for row in rows])

    def evaluate(self) -> dict[str, float]:
        """Return ``eval/loss`` in nats per trained token, and ``eval/perplexity``."""
        if not self._held_out:
            return {}
        scores = self.backend.score(self._held_out)
        total = math.fsum(
            -float(score.logprobs.astype("f8").sum())
            for score in scores
            if score.logprobs is not None
        )
        loss = total / sum(sample.num_tokens for sample in self._held_out)
        # exp overflows float64 above 709.
        return {"eval/loss": loss, "eval/perplexity": math.exp(min(loss, 700.0))}

    def close(self) -> None:
        """Do nothing."""


def supervised_step(backend: Backend, samples: Sequence[TrainSample]) -> dict[str, float]:
    """Take an update on some samples and return its metrics."""
    return optimizer_metrics(backend.update(samples), samples)


def fine_tune(
    path: str,
    data: str,
    out: str | Path,
    *,
    model: ModelSection,
    train: OfflineTrainSection,
    seed: int,
    max_context: int | None = None,
    on_step: OnStep | None = None,
) -> dict[str, float]:
    """Train a model on a file of conversations and write a Hugging Face folder atomically.

    Args:
        path: Hugging Face folder or hub name of the model.
        data: file or folder of conversations, see ``read_dialogue``.
        out: folder to write; replaced if it exists.
        max_context: tokens of the longest sequence that the model must take; None: its own limit.
        on_step: called with the step, from 1, and its metrics.

    Returns:
        loss (mean of the last tenth of the steps), examples, epochs, trained_tokens, seconds.

    Raises:
        UserError: if there is no such model or file, a row is malformed, or the loss is not finite.
    """
    from learner.backends.torch import TorchBackend

    check_model_path(path)
    tokenizer = Tokenizer.load(
        path, trust_remote_code=model.trust_remote_code, chat_template=model.chat_template
    )
    rows = [example.sample() for example in load_examples(data, tokenizer, longest_row(path))]
    backend = TorchBackend(
        path,
        train=backend_train(train),
        algorithm=SFT,
        model=model,
        seed=seed,
        ref_path=path,
        max_context=max_context,
    )
    began_at = time.monotonic()
    losses = []
    num_trained = 0.0
    steps = range(1, train.steps + 1)
    batches = shuffled_batches(len(rows), train.batch_size, seed)
    for step, batch in zip(steps, batches, strict=False):
        values = supervised_step(backend, [rows[row] for row in batch])
        check_finite(values, step, "warm_start.lr", train.lr, backend.take_problem())
        losses.append(values["train/loss"])
        num_trained += values["train/trained_tokens"]
        if on_step is not None:
            on_step(step, values)
    seconds = time.monotonic() - began_at
    with atomic_folder(out) as folder:
        backend.save(folder)
    last_losses = losses[-max(1, train.steps // 10) :]
    epochs = train.steps * train.batch_size / len(rows)
    return {
        "loss": sum(last_losses) / len(last_losses),
        "examples": len(rows),
        "epochs": epochs,
        "trained_tokens": num_trained,
        "seconds": seconds,
    }


def optimizer_metrics(values: dict[str, float], samples: Sequence[TrainSample]) -> dict[str, float]:
    """Return the backend's metrics that apply offline."""
    return {
        "train/loss": values["actor/pg_loss"],
        "train/grad_norm": values["actor/grad_norm"],
        "train/lr": values["actor/lr"],
        "train/skipped": values["actor/skipped"],
        "train/tokens": float(sum(len(sample.token_ids) for sample in samples)),
        "train/trained_tokens": float(sum(sample.num_tokens for sample in samples)),
    }
