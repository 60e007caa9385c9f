"""Runs ``rlearner distill``: a student learns its teacher's distributions on given conversations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Final

import numpy as np

from broker.errors import ConfigError
from broker.settings.runspec import section
from learner.algorithm.samples import TrainSample
from learner.backends.distill import DistillBackend, TaughtSample
from learner.config import AlgorithmSection
from learner.offline.base import OfflineJob
from learner.offline.config import DistillSection, backend_train
from learner.offline.data import load_examples
from learner.offline.supervised import optimizer_metrics
from rlearner_text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from learner.offline.served_teacher import ServedTeacher

MEAN: Final = AlgorithmSection(pg_variant="sft", loss_agg_mode="token-mean")


class DistillationPipeline:
    """A ``Pipeline``; the loss of a step is the mean divergence over all trained tokens of its
    rows.
    """

    def __init__(self, job: OfflineJob) -> None:
        distill = section(job.config, "distill", DistillSection)
        _check_vocabulary(
            job.tokenizer, distill.teacher, trust_remote_code=job.model.trust_remote_code
        )
        most = job.max_tokens()

        def read(path: str, key: str) -> list[TrainSample]:
            return [example.sample() for example in load_examples(path, job.tokenizer, most, key)]

        self._rows, self._held_out = job.load(read)
        self.num_rows = len(self._rows)
        self.backend = DistillBackend(
            job.model_path,
            direction=distill.kl,
            top_k=distill.top_k,
            teacher=None if distill.served else distill.teacher,
            train=backend_train(job.train),
            algorithm=MEAN,
            model=job.model,
            seed=job.run.seed,
            ref_path=job.first_path,
            max_context=most,
        )
        self._served: ServedTeacher | None = None
        self._taught_held_out: list[TrainSample] | None = None
        if distill.served:
            from learner.offline.served_teacher import ServedTeacher

            self._served = ServedTeacher(job, distill)

    def step(self, rows: Sequence[int]) -> dict[str, float]:
        """Take an update; ``train/loss`` is the divergence in nats per trained token."""
        samples = self._taught([self._rows[row] for row in rows])
        return optimizer_metrics(self.backend.update(samples), samples)

    def evaluate(self) -> dict[str, float]:
        """Return ``eval/loss``, the divergence of the held-out rows."""
        if not self._held_out:
            return {}
        if self._taught_held_out is None:
            self._taught_held_out = self._taught(self._held_out)
        return {"eval/loss": self.backend.divergence(self._taught_held_out)}

    def close(self) -> None:
        """Stop the teacher's servers."""
        if self._served is not None:
            self._served.close()

    def _taught(self, samples: Sequence[TrainSample]) -> list[TrainSample]:
        """Return the samples with a served teacher's candidates, or unchanged."""
        if self._served is None:
            return list(samples)
        answers = self._served.ask([sample.token_ids for sample in samples])
        return [
            with_candidates(sample, *answer)
            for sample, answer in zip(samples, answers, strict=True)
        ]


def with_candidates(sample: TrainSample, ids: np.ndarray, logprobs: np.ndarray) -> TaughtSample:
    """Return a sample with a teacher's candidates for its trained tokens, from (n - 1, k) for all
    but the first.
    """
    own = {field.name: getattr(sample, field.name) for field in fields(TrainSample)}
    rows = sample.positions - 1
    return TaughtSample(**own, top_ids=ids[rows].astype(np.int64), top_logprobs=logprobs[rows])


def _check_vocabulary(student: Tokenizer, teacher: str, *, trust_remote_code: bool) -> None:
    """Refuse a teacher with another vocabulary.

    Raises:
        ConfigError: if it differs; names the first token.
    """
    try:
        other = Tokenizer.load(teacher, trust_remote_code=trust_remote_code)
    except ConfigError as error:
        raise ConfigError("distill.teacher", teacher, error.allowed) from None
    own = student.vocabulary()
    theirs = other.vocabulary()
    if own == theirs:
        return
    token = min((own.items() ^ theirs.items()), key=lambda item: (item[1], item[0]))[0]
    there = theirs.get(token, "unknown")
    here = own.get(token, "unknown")
    allowed = f"its vocabulary must be the student's: token {token!r} is {there} there, {here} here"
    raise ConfigError("distill.teacher", teacher, allowed)
