"""Brings a model's configuration and tokenizer to hosts that do not have the run's model folder."""

from __future__ import annotations

import logging
import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Final

import msgspec

from broker.contract import wire
from broker.contract.sizes import PART_BYTES
from broker.contract.streams import MODELS
from broker.errors import UserError, WireError
from broker.jetstream.bus import Bus
from broker.settings.run_settings import RunSettings
from broker.system.aside import aside
from rlearner_text.atomic_folders import atomic_folder
from rlearner_text.hub import TOKENIZER_FILES, is_local

MOST_BYTES: Final = 1 << 28  # of all files together
_NAME: Final = re.compile(r"(?:additional_chat_templates/)?\w[\w.-]{0,127}")
_DECODER: Final = msgspec.msgpack.Decoder(dict[str, bytes])

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LocalModel:
    """The run's model on this host.

    Attributes:
        path: folder or hub name.
        has_weights: False if the folder has only what ``share`` stores; the weights come from the
            learner.
    """

    path: str
    has_weights: bool = True


async def share(bus: Bus, path: str, *, with_code: bool) -> str:
    """Store a local model folder's files, without weights, for other hosts; return their digest.

    Args:
        with_code: whether Python files are part of the model (``model.trust_remote_code``).

    Returns:
        An empty text for a hub name, which every host resolves itself, and for files of more than
        256 MiB.
    """
    if not is_local(path):
        return ""
    files = await aside(MOST_BYTES, lambda: read_files(Path(path), with_code=with_code))
    size = sum(map(len, files.values()))
    if size > MOST_BYTES:
        log.warning(
            "%s: its configuration and tokenizer have %d MiB; other hosts need this folder",
            path,
            size >> 20,
        )
        return ""
    packed = await aside(size, lambda: zlib.compress(msgspec.msgpack.encode(files)))
    digest = digest_of(files)
    bucket = bus.key_value(MODELS)
    starts = range(0, len(packed), PART_BYTES)
    for number, start in enumerate(starts):
        part = wire.ModelPart(digest, number, len(starts), packed[start : start + PART_BYTES])
        await bucket.put(f"{bus.run}.{digest}.{number}", part)
    return digest


async def local_model(bus: Bus, spec: wire.RunSpec) -> LocalModel:
    """Return the run's model on this host: the folder if it is the same here, else a copy.

    Raises:
        UserError: if neither this host nor the broker has its files, or the copy cannot be written.
    """
    digest = spec.model_files
    with_code = RunSettings.of_config(spec.config).model.trust_remote_code
    folder = Path(spec.model_path)
    if (
        not digest
        or await aside(MOST_BYTES, lambda: digest_of(read_files(folder, with_code=with_code)))
        == digest
    ):
        return LocalModel(spec.model_path)
    copy = _cache_folder() / digest
    if digest_of(read_files(copy, with_code=True)) != digest:
        files = await _fetch_files(bus, digest, spec.model_path)
        try:
            copy.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            await aside(MOST_BYTES, lambda: _write_files(copy, files))
        except OSError as error:
            raise UserError(
                f"cannot write {copy}: {error.strerror}; set XDG_CACHE_HOME to a folder of yours"
            ) from None
    log.info(
        "this host has no %s: its files are in %s, the weights come from the learner",
        spec.model_path,
        copy,
    )
    return LocalModel(str(copy), has_weights=False)


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "rlearner" / "models"


def read_files(folder: Path, *, with_code: bool) -> dict[str, bytes]:
    """Return a model folder's files by name, without weights; empty without a folder."""
    patterns = (*TOKENIZER_FILES, "*.py") if with_code else TOKENIZER_FILES
    paths = {file for pattern in patterns for file in folder.glob(pattern) if file.is_file()}
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(paths)}


def digest_of(files: Mapping[str, bytes]) -> str:
    """Return 32 hexadecimal digits of the SHA-256 over names, sizes and contents."""
    hash_value = sha256()
    for name in sorted(files):
        hash_value.update(f"{name}\n{len(files[name])}\n".encode())
        hash_value.update(files[name])
    return hash_value.hexdigest()[:32]


async def _fetch_files(bus: Bus, digest: str, path: str) -> dict[str, bytes]:
    entries = await bus.key_value(MODELS).values(f"{bus.run}.{digest}")
    parts = sorted(
        (part for part in entries.values() if isinstance(part, wire.ModelPart)),
        key=lambda part: part.part,
    )
    try:
        if not parts or [part.part for part in parts] != list(range(parts[0].num_parts)):
            raise WireError("parts are missing")
        files = unpack(b"".join(part.data for part in parts))
        if digest_of(files) != digest:
            raise WireError("their digest is wrong")
    except WireError as error:
        reason = f"this host has no {path}, and its files on the broker cannot be used: {error}"
        raise UserError(f"{reason}; copy the folder here, or restart the learner") from None
    return files


def unpack(packed: bytes) -> dict[str, bytes]:
    """Return the files of stored parts.

    Raises:
        WireError: if the content is not valid, larger than 256 MiB, or names a file outside its
            folder.
    """
    decompressor = zlib.decompressobj()
    try:
        files = _DECODER.decode(decompressor.decompress(packed, MOST_BYTES + (1 << 20)))
    except (zlib.error, msgspec.MsgspecError) as error:
        raise WireError(f"not a model's files: {error}") from None
    if (wrong := next((name for name in files if not _NAME.fullmatch(name)), None)) is not None:
        raise WireError(f"{wrong!r} is not a file of a model")
    return files


def _write_files(target: Path, files: Mapping[str, bytes]) -> None:
    with atomic_folder(target) as folder:
        for name, data in files.items():
            file = folder / name
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(data)
