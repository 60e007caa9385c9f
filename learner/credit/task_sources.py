"""Finds the tasks among which the ledger chooses: their number, their keys, known pass rates."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

from broker.settings.config import CurriculumSection
from broker.settings.registry import resolve
from broker.settings.run_settings import RunSettings
from learner.credit.model_identity import identify_model
from learner.credit.pass_rate_file import FILE, KEY_BYTES, read_pass_rates, write_pass_rates
from learner.credit.task_pool import CurriculumRule, Stage, TaskPart, TaskRule, encode_levels

# Only the package with the environments knows their tasks.
TASKS: Final = "envhub.task_catalogue:chosen_tasks"


class TaskSources:
    """The tasks of the domains with a curriculum, or with files of different weights.

    Attributes:
        rules: by domain, for the ledger.
    """

    def __init__(self, settings: RunSettings) -> None:
        """Read the data sets, and the pass rates of earlier runs.

        Raises:
            UserError: if a data set or a file of pass rates cannot be used.
        """
        self._run = str(settings.run.name)
        tasks: Mapping[str, Any] = resolve("tasks", TASKS, {})(settings)
        if tasks:
            self._model = identify_model(settings.model, settings.warm_start)
        self._keys: dict[str, bytes] = {name: entry.keys for name, entry in tasks.items()}
        self.rules = {
            name: TaskRule(
                tuple(TaskPart(*part) for part in entry.parts),
                blake2b(entry.keys, digest_size=8).hexdigest(),
                self._curriculum(name, settings.domains[name].curriculum),
            )
            for name, entry in tasks.items()
        }

    def _curriculum(self, name: str, section: CurriculumSection | None) -> CurriculumRule | None:
        if section is None:
            return None
        initial = b""
        if section.pass_rates is not None:
            key = f"domains.{name}.curriculum.pass_rates"
            known = read_pass_rates(section.pass_rates, key, self._model)
            keys = self._keys[name]
            num_tasks = len(keys) // KEY_BYTES
            places = (keys[task * KEY_BYTES : (task + 1) * KEY_BYTES] for task in range(num_tasks))
            rates = {task: known[place] for task, place in enumerate(places) if place in known}
            initial = encode_levels(rates, num_tasks)
        return CurriculumRule(
            curriculum_stages(section),
            section.priority,
            section.explore,
            newest_weight=section.newest_weight,
            initial=initial,
        )

    def store_pass_rates(self, folder: Path, ledger: Mapping[str, Any]) -> None:
        """Write the pass rates in a dumped ledger into the run's folder, if it has some.

        Raises:
            OSError: if the folder cannot be written.
        """
        from base64 import b64decode

        levels = {
            name: b64decode(pool["levels"])
            for name, pool in ledger["pools"].items()
            if pool["levels"] and name in self._keys
        }
        # After a change of the tasks, until the ledger has read it, the keys are of others.
        matching = {
            name: value
            for name, value in levels.items()
            if len(value) * KEY_BYTES == len(self._keys[name])
        }
        if matching:
            store = partial(write_pass_rates, folder / FILE, self._model, self._run)
            store(levels=matching, keys=self._keys)


def curriculum_stages(section: CurriculumSection) -> tuple[Stage, ...]:
    """Return the stages of a validated section, of which the first begins at step 0."""
    stages = [Stage(stage.from_step, *stage.band) for stage in section.stages]
    return (Stage(0, *section.band), *stages)
