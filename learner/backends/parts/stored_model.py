"""Describes the weights in a checkpoint's parts: ``model.json``."""

from __future__ import annotations

import msgspec
import torch
from torch import Tensor

from learner.backends.parts.writing import DTYPES


class StoredBase(msgspec.Struct, frozen=True):
    """The frozen model below the adapters."""

    path: str  # folder or hub name
    targets: list[str]  # see ``broker.weights.adapter.adapted``
    scale: float
    transposed: list[str] = []  # those of the targets that hold inputs x outputs of each expert
    # peft's names of factors by their names in the parts, where they differ
    exported_names: dict[str, str] = {}


class StoredModel(msgspec.Struct, frozen=True):
    """What the weights in the parts are."""

    weights: dict[str, tuple[str, list[int]]]  # dtype as safetensors names it, and shape, in order
    same_names: bool  # whether transformers' files have these names and shapes, too
    base: StoredBase | None = None  # of adapters, which alone are in the parts
    original: str = ""  # folder or hub name of the files that the run started from
    kept: list[str] = []  # names in those files of what is never trained, such as a vision tower

    def on_meta(self) -> dict[str, Tensor]:
        """Return the weights on the meta device."""
        return {
            name: torch.empty(shape, dtype=DTYPES[code], device="meta")
            for name, (code, shape) in self.weights.items()
        }

    @property
    def nbytes(self) -> int:
        """Bytes of all weights."""
        return sum(
            torch.Size(shape).numel() * DTYPES[code].itemsize
            for code, shape in self.weights.values()
        )
