"""Finds the tasks that ``rlearner eval`` measures: held-out ones, or all of a file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import yaml

from broker.errors import UserError
from broker.settings.config import UserSettings
from broker.settings.registry import resolve
from broker.settings.run_settings import RunSettings
from broker.settings.runspec import digest_file
from learner.run_folder import noted_epoch

# The envhub makes the tasks, so it counts them.
DOMAIN_EVAL_TASKS: Final = "envhub.config:domain_eval_tasks"
NUM_EVAL_TASKS: Final = "envhub.config:num_eval_tasks"
# Keys of env_args of environments with data files.
FILE = "path"
EVAL_FILE = "eval_path"
SHARE = "eval_share"


def with_whole_files(
    config: UserSettings, overrides: Sequence[str], model: str
) -> tuple[UserSettings, dict[str, str]]:
    """Return a configuration that evaluates whole files of the command, and these by domain.

    Such a file is ``domains.NAME.env_args.eval_path``, or ``path`` of the command line without
    ``eval_path`` and ``eval_share``. Of a file that the model's run has trained on, only the
    held-out share is evaluated.

    Args:
        config: as loaded, not validated.
        overrides: ``key=value`` of the command line.
        model: folder or hub name of the evaluated model.
    """
    domains = config.get("domains")
    if not isinstance(domains, dict):
        return config, {}
    changed = dict(domains)
    files = dict[str, str]()
    for name, domain in domains.items():
        args = domain.get("env_args") if isinstance(domain, dict) else None
        if not isinstance(args, dict):
            continue
        file = args.get(FILE)
        eval_file = args.get(EVAL_FILE)
        if isinstance(eval_file, str):
            files[name] = eval_file
            changed[name] = {**domain, "env_args": {**args, FILE: file or eval_file}}
        elif (
            isinstance(file, str)
            and SHARE not in args
            and _is_named(name, overrides)
            and not was_trained_on(file, model)
        ):
            files[name] = file
            changed[name] = {**domain, "env_args": {**args, EVAL_FILE: file}}
    return {**config, "domains": changed}, files


def _is_named(domain: str, overrides: Sequence[str]) -> bool:
    """Return whether the command line sets the path of a domain's file."""
    keys = [override.partition("=")[0] for override in overrides]
    path_key = f"domains.{domain}.env_args.{FILE}"
    return any(path_key == key or path_key.startswith(f"{key}.") for key in keys)


def was_trained_on(file: str, model: str) -> bool:
    """Return whether a model is a checkpoint of a run that trains on a file of this content."""
    run = next((folder for folder in Path(model).absolute().parents if noted_epoch(folder)), None)
    if run is None:
        return False
    try:
        settings = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
        trained_files = [
            domain["env_args"][FILE]
            for domain in settings["domains"].values()
            if domain["env_args"].get(FILE)
        ]
    except (OSError, ValueError, yaml.YAMLError, TypeError, KeyError, AttributeError):
        return False
    return any(_is_same_file(file, trained_file) for trained_file in trained_files)


def _is_same_file(first: str, second: str) -> bool:
    if os.path.abspath(first) == os.path.abspath(second):
        return True
    try:
        return digest_file(first) == digest_file(second)
    except UserError:  # one of them does not exist
        return False


def task_counts(settings: RunSettings, files: dict[str, str]) -> dict[str, int]:
    """Return how many tasks of each evaluated domain are measured: its own ``eval.tasks``, the
    run's, or by default all of its file.

    Args:
        settings: of the evaluation.
        files: the whole files by domain.

    Raises:
        ConfigError: if a domain has no held-out tasks, or fewer than requested.
    """
    default = resolve("num_eval_tasks", NUM_EVAL_TASKS, {})(settings)
    own = resolve("domain_eval_tasks", DOMAIN_EVAL_TASKS, {})(settings)
    in_file = {name: own[name] for name in files if own[name] is not None}
    return {
        name: settings.eval.of_domain(domain).tasks or in_file.get(name, default)
        for name, domain in settings.evaluated_domains.items()
    }
