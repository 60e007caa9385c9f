"""Runs ``rlearner distill``: a student learns a teacher's distributions on conversations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Final

import numpy as np

from broker.errors import ConfigError
from learner.algorithm.samples import TrainSample
from learner.backends.distill import DistillBackend, TaughtSample
from learner.config import AlgorithmSection
from learner.offline.base import OfflineJob
from learner.offline.config import DistillSettings, backend_train
from learner.offline.data import load_examples, read_dialogue
from learner.offline.supervised import optimizer_metrics
from rlearner_text.rows.sources import DataSource
from rlearner_text.tokenizer import Tokenizer
from rlearner_text.vocabularies.difference import vocabulary_difference

if TYPE_CHECKING:
    from learner.offline.served_teacher import ServedTeacher

MEAN: Final = AlgorithmSection(pg_variant="sft", loss_agg_mode="token-mean")


class DistillationPipeline:
    """Distillation; a step's loss is the mean divergence over the trained tokens of its rows."""

    def __init__(self, job: OfflineJob[DistillSettings]) -> None:
        distill = job.settings.distill
        _check_vocabulary(
            job.tokenizer, distill.teacher, trust_remote_code=job.settings.model.trust_remote_code
        )
        max_tokens = job.max_tokens()

        def read(source: DataSource, key: str) -> list[TrainSample]:
            columns = job.settings.data.columns
            row_filter = job.make_filter(key, lambda row: (read_dialogue(row),))
            examples = load_examples(
                source, job.tokenizer, max_tokens, key, columns=columns, row_filter=row_filter
            )
            return [example.sample() for example in examples]

        self._rows, self._held_out = job.load(read)
        self.num_rows = len(self._rows)
        self.backend = DistillBackend(
            job.model_path,
            direction=distill.kl,
            top_k=distill.top_k,
            teacher=None if distill.served else distill.teacher,
            train=backend_train(job.settings.train),
            algorithm=MEAN,
            model=job.settings.model,
            seed=job.settings.run.seed,
            ref_path=job.first_path,
            max_context=max_tokens,
        )
        self._teacher: ServedTeacher | None = None
        self._labelled_held_out: list[TrainSample] | None = None
        if distill.served:
            from learner.offline.served_teacher import ServedTeacher

            self._teacher = ServedTeacher(job)

    def step(self, rows: Sequence[int]) -> dict[str, float]:
        """Take an update; ``train/loss`` is the divergence in nats per trained token."""
        samples = self._with_teacher([self._rows[row] for row in rows])
        return optimizer_metrics(self.backend.update(samples), samples)

    def evaluate(self) -> dict[str, float]:
        """Return ``eval/loss``, the divergence of the held-out rows."""
        if not self._held_out:
            return {}
        if self._labelled_held_out is None:
            self._labelled_held_out = self._with_teacher(self._held_out)
        return {"eval/loss": self.backend.divergence(self._labelled_held_out)}

    def close(self) -> None:
        """Stop the teacher's servers."""
        if self._teacher is not None:
            self._teacher.close()

    def _with_teacher(self, samples: Sequence[TrainSample]) -> list[TrainSample]:
        """Return the samples with a served teacher's candidates, or unchanged."""
        if self._teacher is None:
            return list(samples)
        answers = self._teacher.ask([sample.token_ids for sample in samples])
        return [
            with_candidates(sample, *answer)
            for sample, answer in zip(samples, answers, strict=True)
        ]


def with_candidates(sample: TrainSample, ids: np.ndarray, logprobs: np.ndarray) -> TaughtSample:
    """Return a sample with a teacher's candidates, which are (n - 1, k) for all but the first."""
    columns = {field.name: getattr(sample, field.name) for field in fields(TrainSample)}
    rows = sample.positions - 1
    return TaughtSample(**columns, top_ids=ids[rows].astype(np.int64), top_logprobs=logprobs[rows])


def _check_vocabulary(student: Tokenizer, teacher: str, *, trust_remote_code: bool) -> None:
    """Refuse a teacher with another vocabulary.

    Raises:
        ConfigError: if it differs; names the first token.
    """
    try:
        teacher_tokenizer = Tokenizer.load(teacher, trust_remote_code=trust_remote_code)
    except ConfigError as error:
        raise ConfigError("distill.teacher", teacher, error.allowed) from None
    if difference := vocabulary_difference(student, teacher_tokenizer):
        allowed = f"its vocabulary must be the student's: {difference}"
        raise ConfigError("distill.teacher", teacher, allowed)
