"""Distillation: the torch backend with a divergence from a teacher instead of the policy loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from broker.errors import ConfigError
from learner.algorithm.losses.distill import candidate_logprobs, distillation_kl, with_rest
from learner.algorithm.samples import Array, TrainSample
from learner.backends.models.batch import TokenBatch
from learner.backends.models.policy import PolicyModel
from learner.backends.torch import TorchBackend
from rlearner_text.config import check_model_path


@dataclass(frozen=True, eq=False)
class TaughtSample(TrainSample):
    """A sample with a remote teacher's logprobs of its T trained tokens."""

    top_ids: Array | None = None  # (T, k) int64, the teacher's best candidates
    top_logprobs: Array | None = None  # (T, k) float32, natural log


class DistillBackend(TorchBackend):
    """Minimises the weighted mean over trained tokens of KL(teacher || student), or the reverse.

    Args:
        direction: forward or reverse.
        top_k: the teacher's best candidates to compare, and the rest as one; 0 compares all tokens.
        teacher: folder or hub name of a teacher to load here; None if samples carry its logprobs.
        settings: arguments of ``TorchBackend``.
    """

    def __init__(
        self, model_path: str, *, direction: str, top_k: int, teacher: str | None, **settings: Any
    ) -> None:
        super().__init__(model_path, **settings)
        passes = self.worker.passes
        teacher_model = None
        if teacher is not None:
            check_model_path(teacher, "distill.teacher")
            loading = {**self._context.loading, "packing": passes.packs}
            teacher_model = PolicyModel(teacher, device=self.device, trainable=False, **loading)
            passes.packs = passes.packs and self.worker.models.can_pack(teacher_model)
        passes.numerator = DivergenceNumerator(
            self.policy, teacher_model, direction=direction, top_k=top_k
        )

    @torch.no_grad()
    def divergence(self, samples: Sequence[TrainSample]) -> float:
        """Return the mean over the trained tokens, in nats."""
        passes = self.worker.passes
        total = 0.0
        count = 0.0
        for part in passes.slices(samples):
            sums = passes.run_one(part, train=False)
            total = total + sums["pg_loss"]
            count = count + sums["tokens"]
        return total / max(count, 1.0)


class DivergenceNumerator:
    """The numerator of ``learner.backends.passes.ModelPasses``: a weighted sum over tokens.

    Raises:
        ConfigError: if ``top_k`` is not below the vocabulary.
    """

    def __init__(
        self, student: PolicyModel, teacher: PolicyModel | None, *, direction: str, top_k: int
    ) -> None:
        self._student = student
        self._teacher = teacher
        self._direction = direction
        self._top_k = top_k
        # Models of one family pad the same vocabulary to different sizes. Tokens that only one of
        # them has are never sampled, and are ignored.
        self._width = min(model.vocab_size for model in (student, teacher or student))
        if top_k >= self._width:
            raise ConfigError(
                "distill.top_k", top_k, f"below {self._width}, the vocabulary; 0 compares all of it"
            )

    def __call__(
        self, samples: Sequence[TrainSample], batch: TokenBatch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the sum with its gradient, and sums for the metrics."""
        if self._teacher is not None:
            with torch.no_grad():
                features = self._teacher.features(batch)
            (divergence,) = self._student.map_logits(batch, self._to_teacher_here, features)
        else:
            columns = [_teacher_column(samples, name) for name in ("top_ids", "top_logprobs")]
            if (largest := int(columns[0].max())) >= self._student.vocab_size:
                size = f"the student's model has {self._student.vocab_size}"
                allowed = f"a smaller one: one of the teacher's best is token {largest}, and {size}"
                raise ConfigError("distill.top_k", columns[0].shape[1], allowed)
            columns = [column.to(self._student.device) for column in columns]
            (divergence,) = self._student.map_logits(batch, self._to_teacher_elsewhere, *columns)
        total = (divergence * batch.advantages).sum()
        return total, {"pg_loss": total}

    def _to_teacher_here(self, logits: Tensor, features: Tensor) -> tuple[Tensor]:
        assert self._teacher is not None
        with torch.no_grad():
            teacher = self._teacher.logits(features).float()[:, : self._width]
        student = logits.float()[:, : self._width]
        if self._top_k:
            best = teacher.topk(self._top_k, -1).indices
            divergence = distillation_kl(
                candidate_logprobs(student, best),
                candidate_logprobs(teacher, best),
                self._direction,
            )
        else:
            divergence = distillation_kl(
                student.log_softmax(-1), teacher.log_softmax(-1), self._direction
            )
        return (divergence,)

    def _to_teacher_elsewhere(self, logits: Tensor, ids: Tensor, logprobs: Tensor) -> tuple[Tensor]:
        return (
            distillation_kl(
                candidate_logprobs(logits.float(), ids), with_rest(logprobs), self._direction
            ),
        )


def _teacher_column(samples: Sequence[TrainSample], name: str) -> Tensor:
    columns: list[Array] = [
        column for sample in samples if (column := getattr(sample, name, None)) is not None
    ]
    if len(columns) < len(samples):
        raise ValueError("a sample has no logprobs of the teacher, and no teacher is loaded")
    return torch.from_numpy(np.concatenate(columns))
