"""Reads a model's weights from disk a share at a time, so that a rank holds only what it keeps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from broker.errors import ConfigError
from learner.backends.megatron.mapping import share_size
from rlearner_text.config import check_model_path
from rlearner_text.hub import model_folder


class WeightFiles:
    """The safetensors files of a model, open within the context.

    Raises:
        ConfigError: if the model does not exist, or its weights have another format.
    """

    def __init__(self, path: str) -> None:
        check_model_path(path)
        self._path = path
        self._files = sorted(Path(model_folder(path)).glob("*.safetensors"))
        if not self._files:
            raise ConfigError("model.path", path, "a model with weights in *.safetensors with train.backend megatron")
        self._stack = ExitStack()
        self._open: dict[str, Any] = {}

    def __enter__(self) -> Self:
        from safetensors import SafetensorError, safe_open

        for file in self._files:
            try:
                handle = self._stack.enter_context(safe_open(str(file), "pt"))
            except (OSError, SafetensorError) as error:
                raise ConfigError("model.path", self._path, f"{file.name} cannot be read: {error}") from None
            self._open |= dict.fromkeys(handle.keys(), handle)
        return self

    def __exit__(self, *_: object) -> None:
        self._open = {}
        self._stack.close()

    def refuse(self, shapes: Mapping[str, Tensor]) -> None:
        """Raise ConfigError if a tensor is missing or has another shape; the message has the first."""
        if missing := sorted(name for name in shapes if name not in self._open):
            allowed = f"{len(missing)} of its weights are missing, the first is {missing[0]}"
            raise ConfigError("model.path", self._path, allowed)
        for name, like in shapes.items():
            found, wanted = tuple(self._open[name].get_slice(name).get_shape()), tuple(like.shape)
            if found != wanted:
                allowed = f"its {name} has shape {found}, its config.json says {wanted}"
                raise ConfigError("model.path", self._path, allowed)

    def whole(self, name: str) -> Tensor:
        """Return a tensor as it is stored."""
        return self.share(name, None, 1, 0)

    def share(self, name: str, dim: int | None, tp: int, share: int) -> Tensor:
        """Return a rank's part of a tensor, padded with zeros at the tensor's end."""
        stored = self._open[name].get_slice(name)
        if dim is None or tp == 1:
            whole: Tensor = stored[:]
            return whole
        shape = stored.get_shape()
        size = share_size(shape[dim], tp)
        start, stop = (min(place * size, shape[dim]) for place in (share, share + 1))
        piece: Tensor = stored[start:stop] if dim == 0 else stored[:, start:stop]
        if stop - start == size:
            return piece
        shape[dim] = size - (stop - start)
        return torch.cat([piece, piece.new_zeros(shape)], dim)


class StoredWeights(Mapping[str, Tensor]):
    """A model's weights, each read on access and cast to the dtype of its namesake in ``like``."""

    def __init__(self, path: str, like: Mapping[str, Tensor]) -> None:
        self._like, self._files = like, ExitStack().enter_context(WeightFiles(path))

    def __getitem__(self, name: str) -> Tensor:
        return self._files.whole(name).to(self._like[name].dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._like)

    def __len__(self) -> int:
        return len(self._like)
