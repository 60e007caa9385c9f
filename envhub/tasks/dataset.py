"""Finds the tasks of a data set: a folder of task folders, or the registry file that names them."""

from __future__ import annotations

import fnmatch
import json
from pathlib import Path
from typing import Any, Final

from broker.errors import ConfigError, DataError
from envhub.tasks.folder import CONFIG

MANIFEST: Final = "dataset.toml"


def find_tasks(path: str, dataset: str, names: tuple[str, ...], key: str) -> list[Path]:
    """Return the task folders of a data set in order.

    Args:
        path: a task folder, a folder of them, or a registry file (JSON).
        dataset: ``name`` or ``name@version`` of one in a registry file.
        names: patterns of the tasks to use; empty: all.
        key: of the setting, for errors.

    Raises:
        ConfigError: if there is none.
        DataError: if the registry file is malformed, or names a task that is not on this host.
    """
    root = Path(path).expanduser()
    if root.is_file():
        folders = _read_registry(root, dataset)
    elif not root.is_dir():
        raise ConfigError(key, path, "a folder of tasks or a registry file that is there")
    elif dataset:
        raise ConfigError("dataset", dataset, "left out: only a registry file has several")
    elif (root / CONFIG).is_file():
        folders = {root.name: root}
    else:
        folders = {
            config.parent.relative_to(root).as_posix(): config.parent
            for config in sorted(root.glob(f"*/{CONFIG}")) + sorted(root.glob(f"*/*/{CONFIG}"))
        }
    if not folders:
        raise ConfigError(key, path, f"a folder with tasks in it: there is no */{CONFIG}")
    chosen = [
        folder
        for name, folder in folders.items()
        if not names or any(fnmatch.fnmatch(name, pattern) for pattern in names)
    ]
    if not chosen:
        some = ", ".join(list(folders)[:5])
        raise ConfigError("tasks", list(names), f"patterns of tasks that are there, such as {some}")
    return chosen


def _read_registry(path: Path, dataset: str) -> dict[str, Path]:
    """Return the folders of one data set of a registry file by the names of its tasks."""
    if path.name == MANIFEST:
        problem = "it names packages of a registry; download them and give the folder with them"
        raise DataError(str(path), 1, problem)
    sets = _registry_sets(path)
    known = {f"{each['name']}@{each['version']}": each for each in sets}
    chosen = [name for name in known if dataset in (name, name.rpartition("@")[0])]
    if not dataset and len(known) == 1:
        chosen = list(known)
    if len(chosen) != 1:
        raise ConfigError("dataset", dataset, f"one of {', '.join(known) or 'none'}")
    folders = {}
    for entry in known[chosen[0]]["tasks"]:
        folder = path.parent / entry["path"]
        if entry.get("git_url") and not folder.is_dir():
            problem = (
                f"task {entry['name']} is in {entry['git_url']}; clone it and put its folder at "
                f"{folder}"
            )
            raise DataError(str(path), 1, problem)
        if not folder.is_dir():
            raise DataError(str(path), 1, f"task {entry['name']}: there is no folder {folder}")
        folders[str(entry["name"])] = folder
    return folders


def _registry_sets(path: Path) -> list[dict[str, Any]]:
    """Return the data sets of a registry file, whose form is checked."""
    try:
        sets = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(str(path), 1, f"not a registry file: {error}") from None
    problem = "not a registry file: a list of objects with name, version and tasks"
    if not isinstance(sets, list):
        raise DataError(str(path), 1, problem)
    for each in sets:
        if not isinstance(each, dict) or not {"name", "version", "tasks"} <= set(each):
            raise DataError(str(path), 1, problem)
        for entry in each["tasks"]:
            if not isinstance(entry, dict) or not {"name", "path"} <= set(entry):
                raise DataError(str(path), 1, "a task of a registry needs name and path")
    return sets
