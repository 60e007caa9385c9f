"""Which families of models work, as ``python -m bench.families`` measured; imports no torch.

The file families.json is the only place with these facts: docs/models.md is generated from it, and
``check``, ``doctor`` and ``plan`` refuse by it before any process starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import msgspec

from broker.errors import ConfigError
from broker.settings.schema.training import LoraSection
from rlearner_text.hub import ModelConfig, is_local, read_json

FILE: Final = Path(str(files("rlearner_text") / "families.json"))
WORKS: Final = "works"
SERVED_CELLS: Final = ("engine", "weights")  # cells of engine hf
TRAINED_CELLS: Final = ("padded", "resume", "export")  # cells of every learner


class Family(msgspec.Struct, frozen=True):
    """A row of the matrix.

    Attributes:
        name: the model_type, and after a dot what is special about it.
        kind: dense, moe, hybrid or vision.
        when: settings of config.json, by dotted path, with which this row is meant rather than the
            plain one.
        cells: ``works``, or why it does not, by the cell's name.
    """

    name: str
    kind: str
    cells: Mapping[str, str]
    when: Mapping[str, Any] = {}

    @property
    def model_type(self) -> str:
        """The ``model_type`` in config.json."""
        return self.name.partition(".")[0]

    def refusal(self, *cells: str) -> str:
        """Return why the first of these cells does not work, empty if all do."""
        return next(
            (self.cells[cell] for cell in cells if self.cells.get(cell, WORKS) != WORKS), ""
        )


class Matrix(msgspec.Struct, frozen=True):
    """All families, with the version of transformers that they were run with."""

    transformers: str
    families: list[Family]


@cache
def read_matrix(file: Path | None = None) -> Matrix:
    """Return the matrix of a file, by default the packaged one."""
    return msgspec.json.decode((file or FILE).read_bytes(), type=Matrix)


def family_of(config: ModelConfig) -> Family | None:
    """Return the row of a model's config.json; None if no model of its type was run."""
    model_type = str(config.get("model_type"))
    rows = [row for row in read_matrix().families if row.model_type == model_type]
    rows = [
        row
        for row in rows
        if all(_setting_at(config, path) == value for path, value in row.when.items())
    ]
    return max(rows, key=lambda row: len(row.when), default=None)


def _setting_at(config: ModelConfig, path: str) -> Any:
    value: Any = config
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def family_at(path: str | None) -> Family | None:
    """Return the row of a local model folder; None for a hub name, an unknown type, and where there
    is no model.

    Raises:
        ConfigError: if its config.json cannot be read.
    """
    if path is None or not is_local(path):
        return None
    return family_of(
        read_json(Path(path).expanduser() / "config.json", path, "model.path", missing_ok=True)
    )


def check_trained(
    family: Family | None, path: str | None, *, packing: str, lora: LoraSection | None
) -> None:
    """Check that a family's models can be trained as ``train.packing`` and ``train.lora`` ask, as
    far as the matrix knows it.

    Raises:
        ConfigError: if not; names the key and the reason.
    """
    if family is None:
        return
    if reason := family.refusal(*TRAINED_CELLS):
        raise ConfigError("model.path", path, f"{family.model_type} cannot be trained: {reason}")
    if packing == "packed" and (reason := family.refusal("packed")):
        allowed = f"auto or padded with {family.model_type}: {reason}"
        raise ConfigError("train.packing", "packed", allowed)
    if lora and (reason := family.refusal("lora")):
        raise ConfigError(
            "train.lora", lora.model_dump(), f"null with {family.model_type}: {reason}"
        )


def check_served(family: Family | None) -> None:
    """Check that engine hf serves a family's models, as far as the matrix knows it.

    Raises:
        ConfigError: if not; names the reason.
    """
    if family is not None and (reason := family.refusal(*SERVED_CELLS)):
        raise ConfigError(
            "rollout.engine", "hf", f"vllm or sglang with {family.model_type}: {reason}"
        )
