"""Keeps the pass rate of each task in ``runs/<name>/pass_rates.jsonl``, for later runs.

The first line names the model; each other one a task by the digest of its row (or of what it is
generated from) and its pass rate.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from broker.errors import ConfigError
from broker.system.private_files import draft_of
from learner.credit.model_identity import ModelIdentity
from learner.credit.task_pool import rates_of

FILE: Final = "pass_rates.jsonl"
FORMAT: Final = 1
# Of a task's key.
KEY_BYTES: Final = 8


class PassRateHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The first line."""

    pass_rates: int  # version of the format
    model: str  # for people
    model_digest: str  # see ``learner.credit.model_identity``
    run: str


class PassRateLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The pass rate of one task."""

    domain: str
    task: str  # its key, 16 hex digits
    rate: float


_ENCODER: Final = msgspec.json.Encoder()


def write_pass_rates(
    path: Path,
    model: ModelIdentity,
    run: str,
    *,
    levels: Mapping[str, bytes],
    keys: Mapping[str, bytes],
) -> None:
    """Replace the file by the measured tasks.

    Args:
        levels: by domain, one byte per task, see ``learner.credit.task_pool``.
        keys: by domain, ``KEY_BYTES`` per task.

    Raises:
        OSError: if the folder cannot be written.
    """
    with draft_of(path) as draft, draft.open("wb") as file:
        header = PassRateHeader(FORMAT, model.name, model.digest, run)
        file.write(_ENCODER.encode(header) + b"\n")
        for domain, domain_levels in levels.items():
            rates = rates_of(domain_levels)
            domain_keys = keys[domain]
            for task in np.flatnonzero(~np.isnan(rates)).tolist():
                key = domain_keys[task * KEY_BYTES : (task + 1) * KEY_BYTES].hex()
                line = PassRateLine(domain, key, round(float(rates[task]), 4))
                file.write(_ENCODER.encode(line) + b"\n")


def find_pass_rates(path: str) -> Path:
    """Return the file that a path names: itself, or that of a run's folder."""
    place = Path(path).expanduser()
    return place / FILE if place.is_dir() else place


def read_pass_rates(path: str, key: str, model: ModelIdentity | None = None) -> dict[bytes, float]:
    """Return the pass rate of each task by its key, in a file or the folder of a run.

    Args:
        key: of the configuration, for error messages.
        model: that the rates must be of; None: any.

    Raises:
        ConfigError: if the file cannot be read, is damaged, or is of another model.
    """
    file = find_pass_rates(path)
    try:
        with file.open("rb") as stream:
            header = msgspec.json.decode(next(stream, b""), type=PassRateHeader)
            if model is not None and header.model_digest != model.digest:
                theirs = f"{header.model} ({header.model_digest})"
                ours = f"{model.name} ({model.digest})"
                allowed = f"pass rates of this run's model, {ours}; the file has those of {theirs}"
                raise ConfigError(key, path, allowed)
            return dict(_read_lines(stream))
    except OSError as error:
        allowed = f"a file of pass rates, or a run's folder: {file}: {error.strerror}"
        raise ConfigError(key, path, allowed) from None
    except (msgspec.DecodeError, ValueError) as error:
        raise ConfigError(key, path, f"a file that a run wrote ({FILE}): {error}") from None


def _read_lines(lines: Iterator[bytes]) -> Iterator[tuple[bytes, float]]:
    decoder = msgspec.json.Decoder(PassRateLine)
    for line in lines:
        entry = decoder.decode(line)
        if not 0 <= entry.rate <= 1:
            raise ValueError(f"pass rate {entry.rate} of task {entry.task} is not from 0 to 1")
        yield bytes.fromhex(entry.task), entry.rate
