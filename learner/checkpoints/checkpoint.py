"""Reads and writes checkpoints: a part for each rank, the ledger, and small models whole.

``checkpoints/step-000020/`` holds configuration and tokenizer, of small models also the weights in
Hugging Face format, and ``learner/``: a part for each rank (``learner.backends.parts``: weights,
optimizer, schedule, RNG), ``model.json`` (what the weights are) and, written last, ``learner.json``
(ledger, log position, epoch, size and digest of each part). It is written into a temporary folder,
synced and renamed, so a folder of that name is always complete. All ranks write into it, so those
of several nodes need a file system that they share.

In format 1 the weights were always in Hugging Face format, and the rest in
``learner/state.safetensors``.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from broker.errors import UserError
from broker.system.private_files import private_folder, replace
from learner.backends.parts.names import MODEL_FILE, STATE_FOLDER
from learner.backends.parts.part_file import DamagedFileError, PartFile
from rlearner_text.atomic_folders import begin_folder, finish_folder, remove_folder, sync_tree

if TYPE_CHECKING:
    from learner.backends.base import Backend, Snapshot

# Format 1, with everything but the weights in one file, is still read.
FORMAT: Final = 2
# Up to this size a model is also written whole, for transformers to load.
HF_MAX_GIB: Final = 8.0
_NAME = re.compile(r"step-(\d{6,})")
# Prefix of a checkpoint that could not be read.
_SET_ASIDE: Final = "damaged-"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk."""

    path: Path
    step: int
    epoch: int
    ledger: dict[str, Any]
    parts: Sequence[PartFile] = ()


def write_checkpoint(
    folder: Path,
    backend: Backend,
    ledger: dict[str, Any],
    epoch: int,
    *,
    hf_max_gib: float = HF_MAX_GIB,
) -> Path:
    """Take and write a checkpoint now; the backend must be between two steps.

    Args:
        folder: ``runs/<name>/checkpoints``.
        ledger: dumped between the same two steps.
        epoch: incarnation of the learner that writes.
        hf_max_gib: largest model whose weights are also written in Hugging Face format.

    Raises:
        OSError: if the folder cannot be written.
    """
    snapshot = backend.snapshot()
    try:
        work = stage_checkpoint(folder, backend, snapshot, ledger, epoch, hf_max_gib=hf_max_gib)
    finally:
        snapshot.drop()
    try:
        return commit_checkpoint(work, folder, ledger["version"])
    finally:
        discard_staged(work)


def stage_checkpoint(
    folder: Path,
    backend: Backend,
    snapshot: Snapshot,
    ledger: dict[str, Any],
    epoch: int,
    *,
    hf_max_gib: float = HF_MAX_GIB,
) -> Path:
    """Write a snapshot into a temporary folder and sync it; from any thread.

    Raises:
        OSError: if the folder cannot be written; nothing is left behind.
        UserError: if a rank on another node does not see the folder.
    """
    from safetensors import SafetensorError

    from learner.backends.parts.hugging_face import write_adapters, write_model

    work = begin_folder(private_folder(folder) / name_of(ledger["version"]))
    try:
        own = work / STATE_FOLDER
        own.mkdir(mode=0o700)
        model = backend.describe(work)
        parts = snapshot.write(own)
        write_adapters(model, [part.path for part in parts], work)
        if model.nbytes <= hf_max_gib * 2**30:
            write_model(model, [part.path for part in parts], work)
        (own / MODEL_FILE).write_bytes(msgspec.json.encode(model))
        files = [
            {"file": Path(part.path).name, "size": part.size, "digest": part.digest}
            for part in parts
        ]
        body = {
            "format": FORMAT,
            "step": ledger["version"],
            "epoch": epoch,
            "parts": files,
            "ledger": ledger,
        }
        # Last: a folder without this file is no checkpoint.
        (own / "learner.json").write_text(json.dumps(body) + "\n", encoding="utf-8")
        sync_tree(work)
    except SafetensorError as error:
        discard_staged(work)
        raise _os_error(error) from None
    except BaseException:
        # Whatever the error: no half-written folder stays, which may be large.
        discard_staged(work)
        raise
    return work


def commit_checkpoint(work: Path, folder: Path, step: int) -> Path:
    """Rename a staged folder, which makes it the run's newest checkpoint."""
    target = folder / name_of(step)
    finish_folder(work, target)
    return target


def discard_staged(work: Path) -> None:
    """Delete a staged folder unless committed."""
    shutil.rmtree(work, ignore_errors=True)


def name_of(step: int) -> str:
    """Return the name of the folder of a step's checkpoint."""
    return f"step-{step:06d}"


def _os_error(error: Exception) -> Exception:
    """Return the operating system's error inside an error of safetensors, or the error itself."""
    # safetensors has no attribute for it; the saver retries only errors of the system.
    match = re.search(r"os error (\d+)", str(error))
    if match is None:
        return error
    code = int(match[1])
    return OSError(code, os.strerror(code))


def load_state(checkpoint: Checkpoint, backend: Backend) -> None:
    """Restore optimizer, schedule and RNG of a backend that was built from ``checkpoint.path``.

    Raises:
        DamagedFileError: if a file is missing or damaged.
        UserError: if the state belongs to another model.
    """
    backend.load_state(checkpoint.parts)


def list_checkpoints(folder: Path) -> list[Path]:
    """Return all checkpoints of a run, oldest first."""
    matches = ((_NAME.fullmatch(path.name), path) for path in folder.glob("step-*"))
    numbered = [(int(match[1]), path) for match, path in matches if match and path.is_dir()]
    return [path for _, path in sorted(numbered)]


def newest_checkpoint(folder: Path) -> Checkpoint | None:
    """Return the newest checkpoint whose files are there, None if there is no checkpoint at all.

    Raises:
        DamagedFileError: if no checkpoint can be read.
        UserError: if another version of rlearner wrote it.
    """
    first: DamagedFileError | None = None
    for path in reversed(list_checkpoints(folder)):
        try:
            return read_checkpoint(path)
        except DamagedFileError as error:
            first = first or error
    if first is not None:
        raise first
    return None


def read_checkpoint(path: Path) -> Checkpoint:
    """Return a checkpoint without its weights.

    Raises:
        DamagedFileError: if it cannot be read, or a part is missing or has another size.
        UserError: if another version of rlearner wrote it.
    """
    file = path / STATE_FOLDER / "learner.json"
    try:
        body = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedFileError(f"{file}: cannot be read: {error}") from None
    file_format = body.get("format") if isinstance(body, dict) else None
    if file_format not in (1, FORMAT):
        raise UserError(f"{file}: format {file_format!r}, this program reads 1 and {FORMAT}")
    step = body.get("step")
    epoch = body.get("epoch")
    ledger = body.get("ledger")
    has_types = isinstance(step, int) and isinstance(epoch, int) and isinstance(ledger, dict)
    if not has_types or ledger.get("version") != step:
        raise DamagedFileError(
            f"{file}: damaged: step {step!r}, epoch {epoch!r}, and no ledger of that step"
        )
    parts = body.get("parts")
    if file_format == 1:
        parts = [{"file": "state.safetensors", "size": -1, "digest": ""}]
    checkpoint = Checkpoint(path, step, epoch, ledger, _read_parts(file, parts))
    for part in checkpoint.parts:
        part.check_size()
    return checkpoint


def verify_checkpoint(path: Path) -> Checkpoint:
    """Read all of a checkpoint's parts and return it without its weights.

    Raises:
        DamagedFileError: if it cannot be read, or a part is not what was written.
        UserError: if another version of rlearner wrote it.
    """
    checkpoint = read_checkpoint(path)
    for part in checkpoint.parts:
        part.verify()
    return checkpoint


def _read_parts(file: Path, listed: Any) -> tuple[PartFile, ...]:
    try:
        parts = tuple(
            PartFile(str(file.parent / _check_name(entry["file"])), entry["size"], entry["digest"])
            for entry in listed
        )
    except (TypeError, KeyError, ValueError) as error:
        raise DamagedFileError(f"{file}: damaged: no list of parts: {error}") from None
    if not parts:
        raise DamagedFileError(f"{file}: damaged: no parts")
    return parts


def _check_name(name: str) -> str:
    # A damaged or hostile list must not name files outside of the checkpoint.
    if name != os.path.basename(name):
        raise ValueError(f"{name!r} is not a file's name")
    return name


def set_aside(path: Path) -> Path:
    """Rename a damaged checkpoint, so that the run continues before it; return the new path."""
    target = path.with_name(_SET_ASIDE + path.name)
    shutil.rmtree(target, ignore_errors=True)
    replace(path, target)
    return target


def prune_checkpoints(folder: Path, keep: int) -> list[Path]:
    """Delete all but the newest ``keep`` checkpoints; return those kept, oldest first."""
    paths = list_checkpoints(folder)
    for path in paths[:-keep]:
        remove_folder(path)
    return paths[-keep:]


def remove_partial(folder: Path) -> None:
    """Delete folders that a killed learner left half written; no other process may be writing."""
    for path in folder.glob(".step-*"):
        shutil.rmtree(path, ignore_errors=True)
