"""Writes the model of a checkpoint for transformers to load, whatever its size."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec

from broker.errors import UserError
from learner.backends.parts.names import MODEL_FILE, STATE_FOLDER
from learner.backends.parts.part_file import DamagedFileError
from learner.checkpoints.checkpoint import Checkpoint
from rlearner_text.atomic_folders import atomic_folder

# A small model's weights are in the checkpoint already; they are written again, in shards.
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json")


def export_model(checkpoint: Checkpoint, out: Path, max_shard_bytes: int) -> None:
    """Write configuration, tokenizer and weights into a new folder, a few megabytes at a time.

    Raises:
        DamagedFileError: if a part of the checkpoint is missing or damaged.
        UserError: if the checkpoint is of the first format, or the folder exists.
    """
    from learner.backends.parts.hugging_face import write_adapters, write_model
    from learner.backends.parts.stored_model import StoredModel

    if out.exists():
        raise UserError(f"--out {out}: exists already; name a new folder")
    about = checkpoint.path / STATE_FOLDER / MODEL_FILE
    if not about.exists():
        raise UserError(f"{checkpoint.path} is of the first format: transformers loads it as it is")
    try:
        model = msgspec.json.decode(about.read_bytes(), type=StoredModel)
    except (OSError, msgspec.MsgspecError) as error:
        raise DamagedFileError(f"{about} cannot be read: {error}") from None
    for part in checkpoint.parts:
        part.verify()
    files = [part.path for part in checkpoint.parts]
    with atomic_folder(out) as work:
        ignored = shutil.ignore_patterns(STATE_FOLDER, *_WEIGHTS)
        shutil.copytree(checkpoint.path, work, ignore=ignored, dirs_exist_ok=True)
        write_adapters(model, files, work)
        write_model(model, files, work, max_shard_bytes=max_shard_bytes)
