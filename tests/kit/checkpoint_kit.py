"""What tests write and read of a backend's state."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from learner.backends.parts.hugging_face import write_adapters, write_model
from learner.backends.parts.part_file import PartFile
from learner.backends.parts.slices import Slice, copy_slices
from learner.backends.parts.stored import StoredTensors
from learner.backends.parts.stored_model import StoredModel
from learner.backends.parts.writing import write_part


def keep(backend: Any, folder: Path, snapshot: Any = None) -> list[PartFile]:
    """Write the live state, or a snapshot, and the model as a checkpoint does; return the parts."""
    (folder / "learner").mkdir(parents=True)
    parts: list[PartFile] = (snapshot or backend.snapshot()).write(folder / "learner")
    model, files = backend.describe(folder), [part.path for part in parts]
    write_adapters(model, files, folder)
    write_model(model, files, folder)
    return parts


def tensors_of(parts: Sequence[PartFile]) -> dict[str, Tensor]:
    """The tensors of a checkpoint's parts that do not depend on the number of ranks, whole."""
    stored = StoredTensors(part.path for part in parts)
    return {name: stored[name] for name in stored if not re.fullmatch(r"rng\.\w+\.\d+", name)}


def state_of(backend: Any) -> dict[str, Tensor]:
    """As ``tensors_of``, of the live state."""
    with tempfile.TemporaryDirectory() as folder:
        return tensors_of(backend.snapshot().write(Path(folder)))


def load_state(backend: Any, state: Mapping[str, Tensor]) -> None:
    """Restore such tensors from a file in the first format."""
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "state.safetensors")
        safetensors.torch.save_file(dict(state), file)
        backend.load_state([PartFile(file)])


class FakeSnapshot:
    """One part with these tensors."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._slices = copy_slices(
            [Slice.whole(name, tensor) for name, tensor in tensors.items()], 0, 1
        )

    def write(self, folder: Path) -> list[PartFile]:
        return [write_part(folder / "part-00001-of-00001.safetensors", self._slices)]

    def drop(self) -> None:
        self._slices = []


class FakeBackend:
    """As much of a backend as a checkpoint needs."""

    def __init__(self, tensors: Mapping[str, Tensor] | None = None) -> None:
        self.tensors = dict(tensors or {"optimizer.step": torch.tensor([7])})
        self.loaded: dict[str, Tensor] = {}

    def snapshot(self) -> FakeSnapshot:
        return FakeSnapshot(self.tensors)

    def describe(self, path: Path) -> StoredModel:
        (path / "config.json").write_text("{}")
        return StoredModel({}, same_names=True)

    def load_state(self, parts: Sequence[PartFile]) -> None:
        for part in parts:
            part.verify()
        self.loaded = tensors_of(parts)
