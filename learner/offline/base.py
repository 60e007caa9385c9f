"""Defines offline pipelines, and the job that the runner makes them from."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeVar

from broker.errors import ConfigError, NotFinite
from broker.settings.registry import resolve
from learner.backends import BACKENDS
from learner.config import AlgorithmSection
from learner.offline.config import (
    OfflineSettings,
    backend_train,
)
from learner.offline.data import SupervisedDialogue, rename_columns
from learner.offline.row_filter import ReadRow, RowFilter, make_filter
from rlearner_text.rows.columns import Row
from rlearner_text.rows.sources import DataSource
from rlearner_text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from learner.backends.base import Backend

log = logging.getLogger(__name__)

# In the run's folder: logprobs under a frozen reference.
REFERENCE: Final = "reference.safetensors"
# In the run's folder: the classifier that a reward model starts from.
CLASSIFIER_FOLDER: Final = "classifier"
# Tokens of a model that names no limit.
_UNLIMITED: Final = 1 << 20


class OfflinePipeline(Protocol):
    """One kind of offline training; the constructor loads data and models."""

    backend: Backend
    num_rows: int  # rows to train on

    def step(self, rows: Sequence[int]) -> dict[str, float]:
        """Take an optimizer step on these rows; return its metrics, ``train/loss`` included."""

    def evaluate(self) -> dict[str, float]:
        """Return metrics of the held-out rows, ``eval/…``; empty without such rows."""

    def close(self) -> None:
        """Release resources other than the backend's."""


S = TypeVar("S", bound=OfflineSettings)


@dataclass(frozen=True)
class OfflineJob(Generic[S]):
    """Inputs of a pipeline.

    Attributes:
        settings: validated.
        folder: of the run.
        first_path: folder or hub name of the weights that the run started from.
        model_path: weights to continue from: the newest checkpoint, or the first ones.
        tokenizer: of the first weights.
        url: of the broker, for a pipeline that uses rollout servers.
    """

    settings: S
    folder: Path
    first_path: str
    model_path: str
    tokenizer: Tokenizer
    url: str = ""

    def max_tokens(self) -> int:
        """Return the longest row in tokens: the configured limit, or the model's.

        Raises:
            ConfigError: if the configured limit is above the model's.
        """
        model_limit = longest_row(self.first_path)
        max_tokens = self.settings.data.max_tokens or model_limit
        if max_tokens > model_limit:
            raise ConfigError(
                "data.max_tokens", max_tokens, f"at most {model_limit}, which the model takes"
            )
        return max_tokens

    def make_backend(self, algorithm: AlgorithmSection, *, path: str | None = None) -> Backend:
        """Return a backend to train, or, with other weights and without adapters, to score."""
        settings = self.settings
        train = backend_train(settings.train)
        backend: Backend = resolve("backends", settings.train.backend, BACKENDS)(
            path or self.model_path,
            train=train if path is None else train.model_copy(update={"lora": None}),
            algorithm=algorithm,
            model=settings.model,
            seed=settings.run.seed,
            ref_path=self.first_path,
            max_context=self.max_tokens(),
        )
        return backend

    def make_filter(self, key: str, read_row: ReadRow) -> RowFilter:
        """Return what is left out of the data set with this key.

        Args:
            read_row: returns the conversations of a row with our names of columns.
        """
        data = self.settings.data

        def read_renamed(row: Row) -> Sequence[SupervisedDialogue]:
            return read_row(rename_columns(row, data.columns or {}))

        return make_filter(data, key, read_renamed)

    def load(self, read: Callable[[DataSource, str], list[Any]]) -> tuple[list[Any], list[Any]]:
        """Return rows to train on, and held-out rows.

        Args:
            read: returns the rows of a data set, given also its key for error messages.
        """
        data = self.settings.data
        rows = read(data.training_source(), "data.train")
        if (source := data.held_out_source()) is not None:
            held_out = read(source, "data.eval")
        else:
            share = max(1, round(len(rows) * data.eval_share)) if data.eval_share else 0
            if share >= len(rows):
                allowed = f"a smaller share: {len(rows)} rows leave none for training"
                raise ConfigError("data.eval_share", data.eval_share, allowed)
            held_out = rows[len(rows) - share :]
            rows = rows[: len(rows) - share]
        return rows, held_out[: self.settings.eval.rows]


def longest_row(path: str) -> int:
    """Return how many tokens a model takes, by its configuration."""
    from rlearner_text.hub import read_json, tokenizer_folder

    config = read_json(tokenizer_folder(path) / "config.json", path, "model.path")
    config = config.get("text_config") or config
    return int(config.get("max_position_embeddings") or _UNLIMITED)


def check_finite(values: Mapping[str, float], step: int, key: str, lr: float, problem: str) -> None:
    """Check the metrics of a step.

    Args:
        key: of the learning rate, for the error message.
        problem: the tensor by which the gradient is not finite, empty if it is not known.

    Raises:
        NotFinite: if the loss or the gradient is not finite.
    """
    loss = values["train/loss"]
    if not math.isfinite(loss) or values.get("train/skipped"):
        summary = "the gradient is not finite" if math.isfinite(loss) else f"the loss is {loss}"
        tensor = f": {problem}" if problem else ""
        raise NotFinite(f"{summary} at step {step}{tensor}; lower {key} ({lr})")
