"""Reads what a configuration asks for, together with the sizes of its models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from broker.settings.run_settings import RunSettings
from broker.settings.runspec import check_settings, load
from rlearner.plan.candidates import Workload
from rlearner.plan.demands import read_demands
from rlearner.plan.facts import Memory, ModelFacts
from rlearner.plan.model_reader import read_model, reward_parts
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
        config: as the user wrote it, without defaults.
        settings: the same with defaults.
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
        self.config = load(path, overrides)
        self.settings = check_settings(self.config, checks=CHECKS)
        check_trained_model(self.settings.model, has_weights=False, from_hub=True)

    def read(self, more: Sequence[str] = ()) -> Workload:
        """Return what the run computes, with further settings ``key=value``.

        Raises:
            UserError: if they are not allowed, or there is no model.
        """
        if tuple(more) not in self._read:
            self._read[tuple(more)] = self._with(more)
        return self._read[tuple(more)]

    def _with(self, more: Sequence[str]) -> Workload:
        config = self.config
        settings = self.settings
        if more:
            config = load(self._path, [*self._overrides, *more])
            settings = check_settings(config, checks=CHECKS)
        model = self._model(settings)
        demands = read_demands(config, settings, model)
        parts = tuple(reward_parts(path, dtype) for path, dtype in demands.rewards)
        return Workload(model, demands, Memory(parts, "scoring") if parts else None)

    def _model(self, settings: RunSettings) -> ModelFacts:
        model = settings.model
        lora = settings.train.lora
        key = f"{model!r} {lora!r}"
        if key not in self._models:
            self._models[key] = read_model(model, lora)
        return self._models[key]
