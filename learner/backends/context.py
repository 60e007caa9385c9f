"""The settings that a training backend is built from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from broker.errors import ConfigError
from learner.backends.ranks.rendezvous import settings_on_rank
from learner.backends.section_checks import check_values
from learner.config import AlgorithmSection, TrainSection
from rlearner_text.config import ModelSection


@dataclass(frozen=True)
class RunContext:
    """The arguments of ``learner.backends.base.Backend``."""

    model_path: str
    train: TrainSection
    algorithm: AlgorithmSection
    model: ModelSection
    seed: int
    ref_path: str | None = None
    max_length: int | None = None
    max_context: int | None = None
    exact: bool = False

    @property
    def first_path(self) -> str:
        """The weights that the run began with; unlike checkpoints, they are never deleted."""
        return self.ref_path or self.model_path

    @property
    def policy_path(self) -> str:
        """The weights of the policy, below its adapters if it has any."""
        return self.first_path if self.train.lora else self.model_path

    @property
    def packing(self) -> bool:
        """Whether models should take packed rows if they can."""
        return self.train.packing != "padded"

    @property
    def loading(self) -> dict[str, Any]:
        """Arguments of ``PolicyModel``, the same for all models of the run."""
        return {"model": self.model, "packing": self.packing, "max_context": self.max_context}

    def on_rank(self, local_rank: int, num_here: int) -> RunContext:
        """Return the settings of one of this host's ranks, with its own device."""
        return replace(self, train=settings_on_rank(self.train, local_rank, num_here))

    def check(self) -> None:
        """Raise ConfigError if settings exclude each other."""
        algorithm = self.algorithm
        check_values(self.model, algorithm)
        if algorithm.loss_agg_mode == "seq-mean-token-sum-norm" and self.max_length is None:
            raise ConfigError(
                "algorithm.loss_agg_mode", algorithm.loss_agg_mode, "it needs a maximum length"
            )
