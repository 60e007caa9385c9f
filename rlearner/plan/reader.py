"""Reads what a configuration asks for, together with the sizes of its models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from broker.settings.runspec import load, section, validate
from learner.config import TrainSection
from rlearner.plan.candidates import Workload
from rlearner.plan.demands import read_demands
from rlearner.plan.facts import Memory, ModelFacts
from rlearner.plan.model_reader import read_model, reward_parts
from rlearner_text.config import ModelSection
from rlearner_text.model_checks import check_trained_model

# The checks of a run that depend neither on the plan's choices nor on files of the hosts.
CHECKS: Final = (
    "learner.checks:check_names",
    "learner.checks:check_run_family",
    "rollout.checks:check",
)


class WorkloadReader:
    """Reads one configuration, also with further settings; a model's sizes are read once.

    Attributes:
        settings: the configuration without defaults.
        config: the same with defaults.
    """

    def __init__(self, path: str, overrides: Sequence[str]) -> None:
        """Read the configuration.

        Raises:
            UserError: if it is wrong, or not for a run.
        """
        self._path = path
        self._overrides = list(overrides)
        self._models: dict[str, ModelFacts] = {}
        self._read: dict[tuple[str, ...], Workload] = {}
        self.settings = load(path, overrides)
        self.config = validate(self.settings, checks=CHECKS)
        model = section(self.config, "model", ModelSection)
        check_trained_model(model, has_weights=False, from_hub=True)

    def read(self, more: Sequence[str] = ()) -> Workload:
        """Return what the run computes, with further settings ``key=value``.

        Raises:
            UserError: if they are not allowed, or there is no model.
        """
        if tuple(more) not in self._read:
            self._read[tuple(more)] = self._with(more)
        return self._read[tuple(more)]

    def _with(self, more: Sequence[str]) -> Workload:
        settings = self.settings
        config = self.config
        if more:
            settings = load(self._path, [*self._overrides, *more])
            config = validate(settings, checks=CHECKS)
        model = self._model(config)
        demands = read_demands(settings, config, model)
        parts = tuple(reward_parts(path, dtype) for path, dtype in demands.rewards)
        return Workload(model, demands, Memory(parts, "scoring") if parts else None)

    def _model(self, config: dict[str, Any]) -> ModelFacts:
        model = section(config, "model", ModelSection)
        lora = section(config, "train", TrainSection).lora
        key = f"{model!r} {lora!r}"
        if key not in self._models:
            self._models[key] = read_model(model, lora)
        return self._models[key]
