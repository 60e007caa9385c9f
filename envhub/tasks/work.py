"""Moves what an agent left behind to the tests: files and folders only, never links or devices."""

from __future__ import annotations

import asyncio
import errno
import fnmatch
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from envhub.tasks.config import ArtifactTable
from envhub.tasks.errors import TaskError
from envhub.tasks.host import run_checked
from rlearner_sandbox.providers.base import EpisodeSandbox, SandboxError

_LINKS: Final = "=links="
_FILES: Final = "=files="
# find is of the verifier's own image, where the agent has never been
_LIST: Final = (
    f"find . -mindepth 1 -type d -print0; printf '{_LINKS}\\0'; find . -type l -print0; "
    f"printf '{_FILES}\\0'; find . ! -type d ! -type l -print0"
)


class UncopiedWork(Exception):
    """The agent left more than the tests are given, or paths that no host can hold."""


def is_agents_fault(error: SandboxError) -> bool:
    """Return whether a copy failed because of what the agent wrote, not because of the host."""
    return os.strerror(errno.ENAMETOOLONG) in str(error)


@dataclass(frozen=True)
class WorkPart:
    """A file or folder of the agent's sandbox, copied to this host.

    Attributes:
        source: its path in both sandboxes.
        copy: the copy; None if the agent left none.
    """

    source: str
    copy: Path | None


async def collect_work(
    sandbox: EpisodeSandbox,
    workdir: str,
    artifacts: Sequence[ArtifactTable],
    folder: Path,
    max_mib: int,
) -> list[WorkPart]:
    """Copy the working folder and the artifacts of a sandbox to an empty folder of this host.

    Raises:
        UncopiedWork: if they have more than ``max_mib``.
        SandboxError: if the provider fails.
    """
    parts = []
    entries = [ArtifactTable(source=workdir), *artifacts]
    for number, entry in enumerate(entries):
        source = str(PurePosixPath(workdir, entry.source))
        target = folder / str(number)
        try:
            await sandbox.download(source, target, max_bytes=max_mib << 20)
        except FileNotFoundError:
            parts.append(WorkPart(source, None))
            continue
        except ValueError as error:
            raise UncopiedWork(f"{source}: {error}") from None
        if entry.exclude and target.is_dir():
            await asyncio.to_thread(_remove_excluded, target, entry.exclude)
        parts.append(WorkPart(source, target))
    return parts


async def place_work(sandbox: EpisodeSandbox, parts: Sequence[WorkPart]) -> None:
    """Make the parts of an agent's sandbox those of a fresh one: what is gone there goes here, too.

    Raises:
        TaskError: if a command of the image fails.
        SandboxError: if the provider fails.
    """
    for part in parts:
        copy = part.copy
        if copy is None or not copy.is_dir():
            await run_checked(sandbox, ["rm", "-rf", "--", part.source], part.source)
            if copy is not None:
                parent = str(PurePosixPath(part.source).parent)
                await run_checked(sandbox, ["mkdir", "-p", "--", parent], part.source)
                await sandbox.upload(copy, part.source)
            continue
        await run_checked(sandbox, ["mkdir", "-p", "--", part.source], part.source)
        listing = await run_checked(sandbox, _LIST, part.source, workdir=part.source)
        stale = _stale_paths(listing, copy)
        if stale:
            result = await sandbox.run_command(
                ["xargs", "-0", "rm", "-rf", "--"],
                workdir=part.source,
                stdin=b"\0".join(os.fsencode(path) for path in stale),
            )
            if result.exit_code:
                raise TaskError(f"{part.source}: its old files cannot be removed")
        await sandbox.upload(copy, part.source)


def _stale_paths(listing: bytes, copy: Path) -> list[str]:
    """Return the paths of a fresh folder that an agent's copy lacks or has as another type.

    A link stays unless something has taken its place: copies never hold links.
    """
    paths = [os.fsdecode(path) for path in listing.split(b"\0") if path]
    links_at = paths.index(_LINKS)
    files_at = paths.index(_FILES)
    stale = [path for path in paths[:links_at] if not (copy / path).is_dir()]
    stale += [path for path in paths[links_at + 1 : files_at] if os.path.lexists(copy / path)]
    stale += [path for path in paths[files_at + 1 :] if not (copy / path).is_file()]
    return stale


def _remove_excluded(folder: Path, patterns: Sequence[str]) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):
        name = path.relative_to(folder).as_posix()
        if not any(
            fnmatch.fnmatch(name, pattern) or fnmatch.fnmatch(path.name, pattern)
            for pattern in patterns
        ):
            continue
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
