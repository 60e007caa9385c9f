"""Reads what a configuration asks for, together with the sizes of its models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from broker.settings.run_settings import RunSettings
from broker.settings.runspec import check_settings, load
from learner.config import LoraSection
from rlearner.plan.candidates import Workload
from rlearner.plan.demands import read_demands, read_serving
from rlearner.plan.facts import Memory, ModelFacts
from rlearner.plan.model_reader import read_model, reward_parts
from rlearner.plan.teacher_servers import TeacherFacts
from rlearner_text.config import ModelSection
from rlearner_text.model_checks import check_trained_model
from rollout.checks import teacher_section

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
        rewards = Memory(parts, "scoring") if parts else None
        return Workload(model, demands, rewards, self._teachers(settings))

    def _teachers(self, settings: RunSettings) -> tuple[TeacherFacts, ...]:
        """Return the teachers that need GPUs, once for each policy that serves one."""
        teachers: dict[str, TeacherFacts] = {}
        for name, teacher in settings.teachers.items():
            if teacher.model_path is None:
                continue
            section = teacher_section(settings, name)
            serve = read_serving(section)
            if serve is None:
                continue
            own = {"path": teacher.model_path, "dtype": teacher.dtype or settings.model.dtype}
            model = self._model_of(settings.model.model_copy(update=own), None)
            policy = teacher.policy or name
            arguments = section.engine_args
            teachers[policy] = TeacherFacts(name, policy, model, serve, engine_args=arguments)
        return tuple(teachers.values())

    def _model(self, settings: RunSettings) -> ModelFacts:
        return self._model_of(settings.model, settings.train.lora)

    def _model_of(self, model: ModelSection, lora: LoraSection | None) -> ModelFacts:
        key = f"{model!r} {lora!r}"
        if key not in self._models:
            self._models[key] = read_model(model, lora)
        return self._models[key]
