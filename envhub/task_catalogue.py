"""Lists the tasks of domains, for a learner that chooses among them, and the rows of data sets."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

from broker.errors import ConfigError
from broker.settings.run_settings import RunSettings
from envhub.domain import Domain, load_domains

KEY_BYTES: Final = 8


@dataclass(frozen=True)
class TaskCatalogue:
    """The training tasks of a domain.

    Attributes:
        parts: (number of tasks, weight) of each part, in the order of the tasks.
        keys: ``KEY_BYTES`` of each task, equal for equal tasks.
    """

    parts: Sequence[tuple[int, float]]
    keys: bytes


def chosen_tasks(settings: RunSettings) -> dict[str, TaskCatalogue]:
    """Return the tasks of each trained domain whose tasks the learner chooses.

    Raises:
        UserError: if a data set cannot be read.
    """
    domains = load_domains(settings)
    return {
        name: _list_tasks(domains[name], settings.run.seed)
        for name in settings.trained_domains
        if domains[name].has_chosen_tasks
    }


def dataset_rows(settings: RunSettings) -> dict[str, dict[str, list[bytes]]]:
    """Return a digest of each row, in order, by domain and path of the data set.

    Raises:
        UserError: if a data set cannot be read.
    """
    rows = {
        name: domain.environment.row_digests(domain.args)
        for name, domain in load_domains(settings).items()
    }
    return {name: digests for name, digests in rows.items() if digests}


def check_tasks(domain: Domain) -> None:
    """Check that a domain with a curriculum has as many tasks as it asks for.

    Raises:
        ConfigError: if it makes tasks without end and gives no number, or has fewer.
    """
    curriculum = domain.section.curriculum
    if curriculum is None:
        return
    key = f"domains.{domain.name}.curriculum.tasks"
    num_tasks = domain.num_tasks("train")
    if num_tasks is None and curriculum.tasks is None:
        allowed = f"a number: environment {domain.section.env} makes tasks without end"
        raise ConfigError(key, None, allowed)
    if num_tasks is not None and curriculum.tasks is not None and curriculum.tasks > num_tasks:
        raise ConfigError(key, curriculum.tasks, f"at most {num_tasks}, or null for all")
    if curriculum.tasks is not None and domain.environment.task_parts(domain.args):
        raise ConfigError(key, curriculum.tasks, "null with env_args.weights")


def _list_tasks(domain: Domain, seed: int) -> TaskCatalogue:
    curriculum = domain.section.curriculum
    parts = list(domain.environment.task_parts(domain.args))
    num_tasks = sum(count for count, _ in parts) or domain.num_tasks("train")
    if curriculum is not None and curriculum.tasks is not None:
        num_tasks = curriculum.tasks
    assert num_tasks is not None, "checked"
    keys = domain.environment.task_keys(domain.args)
    if keys is None:
        # The task is generated from these.
        source = json.dumps(domain.args.to_plain(), sort_keys=True)
        origin = f"{domain.section.env}/{source}/{seed}/{domain.name}"
        texts = (f"{origin}/{task}".encode() for task in range(num_tasks))
        keys = [blake2b(text, digest_size=KEY_BYTES).digest() for text in texts]
    return TaskCatalogue(parts or [(num_tasks, 1.0)], b"".join(keys[:num_tasks]))
