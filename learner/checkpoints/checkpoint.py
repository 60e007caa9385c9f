"""Reads and writes checkpoints: folders that transformers loads, with the learner's state.

``checkpoints/step-000020/`` holds the model in Hugging Face format and ``learner/``: ``state.safetensors`` (optimizer,
schedule, RNG) and ``learner.json`` (ledger, log position, epoch). It is written into a temporary folder, synced and
renamed, so a folder of that name is always complete.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from broker.errors import UserError
from broker.system.private_files import private_folder
from rlearner_text.atomic_folders import begin_folder, finish_folder, remove_folder, sync_tree

if TYPE_CHECKING:
    from learner.backends.base import Backend, Snapshot

FORMAT: Final = 1
_NAME = re.compile(r"step-(\d{6,})")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk."""

    path: Path
    step: int
    epoch: int
    ledger: dict[str, Any]


def write(folder: Path, backend: Backend, ledger: dict[str, Any], epoch: int) -> Path:
    """Take and write a checkpoint now; the backend must be between two steps.

    Args:
        folder: ``runs/<name>/checkpoints``.
        ledger: dumped between the same two steps.
        epoch: incarnation of the learner that writes.

    Raises:
        OSError: if the folder cannot be written.
    """
    work = stage(folder, backend, backend.snapshot(), ledger, epoch)
    try:
        return commit(work, folder, ledger["version"])
    finally:
        discard(work)


def stage(folder: Path, backend: Backend, snapshot: Snapshot, ledger: dict[str, Any], epoch: int) -> Path:
    """Write a snapshot into a temporary folder and sync it; from any thread, while the backend trains.

    Raises:
        OSError: if the folder cannot be written; nothing is left behind.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    work = begin_folder(private_folder(folder) / name_of(ledger["version"]))
    try:
        backend.save(work, snapshot.weights)
        own = work / "learner"
        own.mkdir(mode=0o700)
        save_file(snapshot.state, str(own / "state.safetensors"))
        body = {"format": FORMAT, "step": ledger["version"], "epoch": epoch, "ledger": ledger}
        (own / "learner.json").write_text(json.dumps(body) + "\n", encoding="utf-8")
        sync_tree(work)
    except SafetensorError as error:
        discard(work)
        raise _os_error(error) from None
    except BaseException:
        discard(work)
        raise
    return work


def commit(work: Path, folder: Path, step: int) -> Path:
    """Rename a staged folder, which makes it the run's newest checkpoint."""
    target = folder / name_of(step)
    finish_folder(work, target)
    return target


def discard(work: Path) -> None:
    """Delete a staged folder unless committed."""
    shutil.rmtree(work, ignore_errors=True)


def name_of(step: int) -> str:
    """Return the name of the folder of a step's checkpoint."""
    return f"step-{step:06d}"


def _os_error(error: Exception) -> Exception:
    """Return the operating system's error inside an error of safetensors, else that error itself."""
    code = re.search(r"os error (\d+)", str(error))
    return OSError(int(code[1]), os.strerror(int(code[1]))) if code else error


def load_state(checkpoint: Checkpoint, backend: Backend) -> None:
    """Restore optimizer, schedule and RNG of a backend that was built from ``checkpoint.path``.

    Raises:
        UserError: if the file is damaged.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    file = checkpoint.path / "learner" / "state.safetensors"
    try:
        state = load_file(str(file))
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file}: cannot be read: {' '.join(str(error).split())}") from None
    backend.load_state(state)


def list_checkpoints(folder: Path) -> list[Path]:
    """Return all checkpoints of a run, oldest first."""
    found = ((_NAME.fullmatch(path.name), path) for path in folder.glob("step-*"))
    named = [(int(match[1]), path) for match, path in found if match and path.is_dir()]
    return [path for _, path in sorted(named)]


def newest_checkpoint(folder: Path) -> Checkpoint | None:
    """Return the checkpoint to resume from, None if there is none.

    Raises:
        UserError: if it cannot be read, or another version of rlearner wrote it.
    """
    paths = list_checkpoints(folder)
    return read_checkpoint(paths[-1]) if paths else None


def read_checkpoint(path: Path) -> Checkpoint:
    """Return a checkpoint without its weights.

    Raises:
        UserError: if it cannot be read, or another version of rlearner wrote it.
    """
    file = path / "learner" / "learner.json"
    try:
        body = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{file}: cannot be read: {error}") from None
    if (found := body.get("format") if isinstance(body, dict) else None) != FORMAT:
        raise UserError(f"{file}: format {found!r}, this program reads {FORMAT}")
    step, epoch, ledger = body.get("step"), body.get("epoch"), body.get("ledger")
    has_types = isinstance(step, int) and isinstance(epoch, int) and isinstance(ledger, dict)
    if not has_types or ledger.get("version") != step:
        raise UserError(f"{file}: damaged: step {step!r}, epoch {epoch!r}, and no ledger of that step")
    return Checkpoint(path, step, epoch, ledger)


def prune(folder: Path, keep: int) -> list[Path]:
    """Delete all but the newest ``keep`` checkpoints; return those kept, oldest first."""
    paths = list_checkpoints(folder)
    for path in paths[:-keep]:
        remove_folder(path)
    return paths[-keep:]


def remove_partial(folder: Path) -> None:
    """Delete folders that a killed learner left half written; no other process may be writing."""
    for path in folder.glob(".step-*"):
        shutil.rmtree(path, ignore_errors=True)
