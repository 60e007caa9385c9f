"""Decides which image a task begins with: its Dockerfile, its image, and the run's map of both."""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from broker.errors import ConfigError
from envhub.tasks.config import EnvironmentTable
from envhub.tasks.dockerfile import BUILD, ImagePlan, read_dockerfile
from envhub.tasks.folder import Task

# the host's own system, read-only
HOST: Final = "host"
DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}")
DEFAULT_WORKDIR: Final = "/app"


def plan_agent(task: Task, images: Mapping[str, str]) -> ImagePlan:
    """Return what the agent's sandbox begins with.

    Raises:
        ConfigError: if the run names no image for it, with key ``images``.
        DataError: if the Dockerfile needs a builder.
    """
    folder = task.folder / "environment"
    plan = _plan_folder(task, task.table.environment, folder, images)
    is_image = task.table.environment.docker_image is not None and task.name not in images
    if not is_image or (folder / "Dockerfile").is_file() or not folder.is_dir():
        return plan
    return dataclasses.replace(plan, has_loose_files=any(folder.iterdir()))


def plan_verifier(task: Task, tests: Path, images: Mapping[str, str]) -> ImagePlan | None:
    """Return what a verifier with an image of its own begins with, None if it has none.

    Args:
        tests: the folder whose Dockerfile it is.

    Raises:
        ConfigError: as ``plan_agent``.
        DataError: likewise.
    """
    table = task.table.verifier.environment
    has_image = table is not None and table.docker_image is not None
    if not has_image and not (tests / "Dockerfile").is_file():
        return None
    return _plan_folder(task, table or EnvironmentTable(), tests, images)


def _plan_folder(
    task: Task, table: EnvironmentTable, folder: Path, images: Mapping[str, str]
) -> ImagePlan:
    file = folder / "Dockerfile"
    if (built := images.get(task.name)) is not None:
        # the whole of it was built beforehand
        plan = ImagePlan(_check_image(task.name, built), folder, workdir=_workdir_of(file))
    elif table.docker_image is not None:
        base = _find_image(task, table.docker_image, images)
        plan = ImagePlan(base, folder, file=None)
    elif file.is_file():
        plan = read_dockerfile(file)
        plan = dataclasses.replace(plan, base=_find_image(task, plan.base, images))
    else:
        allowed = f"an environment/Dockerfile or environment.docker_image in task {task.name}"
        raise ConfigError("path", str(task.folder), allowed)
    return dataclasses.replace(plan, workdir=table.workdir or plan.workdir or DEFAULT_WORKDIR)


def _workdir_of(file: Path) -> str:
    """Return the last folder that a Dockerfile names, although its steps are not played."""
    if not file.is_file():
        return ""
    folders = re.findall(r"^\s*WORKDIR\s+(/\S*)", file.read_text(errors="replace"), re.MULTILINE)
    return folders[-1] if folders else ""


def _find_image(task: Task, name: str, images: Mapping[str, str]) -> str:
    pattern = next((pattern for pattern in images if fnmatch.fnmatch(name, pattern)), None)
    if pattern is None:
        allowed = (
            f"a map with the image {name!r} of task {task.name}: to {HOST}, a folder with a root "
            f"file system, or the digest of layers; {BUILD}"
        )
        raise ConfigError("images", dict(images), allowed)
    return _check_image(pattern, images[pattern])


def _check_image(name: str, image: str) -> str:
    if image == HOST or DIGEST.fullmatch(image) or Path(image).is_dir():
        return image
    allowed = f"{HOST}, a folder that is there, or a digest sha256:…"
    raise ConfigError(f"images.{name}", image, allowed)
