"""Sources of a written model's tensors: parts, merged adapters, conversions, original files."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from broker.errors import UserError
from broker.weights.adapter import MergedModel
from broker.weights.memory.on_demand import OnDemand
from learner.backends.models.auto_classes import auto_class_of, import_auto_class
from learner.backends.parts.names import MODEL
from learner.backends.parts.original import find_original
from learner.backends.parts.part_file import DamagedFileError
from learner.backends.parts.stored import StoredTensors, weights_in_files
from learner.backends.parts.stored_model import StoredBase, StoredModel
from learner.backends.parts.writing import iter_bytes
from rlearner_text.hub import model_folder, read_json
from rlearner_text.stored_form import stored_form, stored_groups, use_conversions
from rlearner_text.transformers_import import import_transformers

log = logging.getLogger(__name__)


class WeightSource(Protocol):
    """Tensors to write.

    Attributes:
        shapes: on the meta device, by name, in order.
    """

    shapes: dict[str, Tensor]

    def pieces(self, name: str) -> Iterator[memoryview]:
        """Yield a tensor's bytes."""

    def tensor(self, name: str) -> Tensor:
        """Return a tensor."""


class StoredWeights:
    """The weights in the parts."""

    def __init__(self, model: StoredModel, tensors: StoredTensors) -> None:
        self.shapes = model.on_meta()
        self._tensors = tensors
        missing = [name for name in model.weights if MODEL + name not in tensors]
        # With adapters, the parts have these alone.
        if missing and model.base is None:
            raise DamagedFileError(
                f"the parts lack {len(missing)} weights, the first is {missing[0]}"
            )

    def pieces(self, name: str) -> Iterator[memoryview]:
        yield from _stored_pieces(self._tensors, MODEL + name)

    def tensor(self, name: str) -> Tensor:
        return self._tensors[MODEL + name]


class MergedWeights:
    """The base's weights with the adapters merged in.

    They are read one by one; if the base's files have other names or shapes, all are in memory.
    """

    def __init__(self, model: StoredModel, base: StoredBase, factors: Mapping[str, Tensor]) -> None:
        self.shapes = like = model.on_meta()
        tensors = weights_in_files(Path(model_folder(base.path)))
        stored_shapes = {name: tensors.entries[name].shape for name in like if name in tensors}
        weights: Mapping[str, Tensor] = CastWeights(tensors, like)
        if (
            stored_shapes != {name: tuple(tensor.shape) for name, tensor in like.items()}
            or not model.same_names
        ):
            weights = _load_converted(base.path, like)
        self._weights = MergedModel(weights, factors, base.targets, base.scale, base.transposed)

    def pieces(self, name: str) -> Iterator[memoryview]:
        yield from iter_bytes(self.tensor(name))

    def tensor(self, name: str) -> Tensor:
        return self._weights[name].contiguous()


def _load_converted(path: str, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a model's weights as transformers loads them."""
    log.info("%s: its weights are held in memory, to be converted", path)
    dtype = next(iter(like.values())).dtype
    folder = model_folder(path)
    module = _import_class(Path(folder)).from_pretrained(folder, dtype=dtype, use_safetensors=True)
    state = module.state_dict()
    return {name: state[name] for name in like}


def _import_class(folder: Path) -> Any:
    """Return the class of transformers that loads a folder: of language models, or classifiers."""
    config = read_json(folder / "config.json", str(folder), "model.path")
    return import_auto_class(auto_class_of(config))


class ConvertedWeights:
    """Weights as transformers stores them: with other names, or stacked experts one by one."""

    def __init__(self, model: StoredModel, source: WeightSource, folder: Path) -> None:
        import_transformers()
        from transformers import AutoConfig

        kind = _import_class(folder)
        with torch.device("meta"):
            self._module: Any = kind.from_config(AutoConfig.from_pretrained(folder))
        if model.original:
            use_conversions(
                self._module,
                list(find_original(model.original).tensors),
                list(self._module.state_dict()),
            )
        self._source = source
        groups = stored_groups(self._module, source.shapes)
        self.shapes = {name: tensor for _, form in groups for name, tensor in form.items()}
        self._weights = {name: weights for weights, form in groups for name in form}
        self._current: tuple[list[str], dict[str, Tensor]] = ([], {})

    def pieces(self, name: str) -> Iterator[memoryview]:
        yield from iter_bytes(self.tensor(name).contiguous())

    def tensor(self, name: str) -> Tensor:
        if (weights := self._weights[name]) != self._current[0]:
            self._current = ([], {})
            form = stored_form(
                self._module, {weight: self._source.tensor(weight) for weight in weights}
            )
            self._current = (weights, form)
        return self._current[1][name]


class KeptWeights:
    """What is never trained, in the original files."""

    def __init__(self, model: StoredModel) -> None:
        self._tensors = find_original(model.original).tensors
        if missing := [name for name in model.kept if name not in self._tensors]:
            problem = (
                f"{len(missing)} tensors of it, which the model does not train and a copy keeps"
            )
            raise UserError(f"{model.original} lacks {problem}; the first is {missing[0]}")
        entries = {name: self._tensors.entries[name] for name in model.kept}
        self.shapes = {
            n: torch.empty(entry.shape, dtype=entry.dtype, device="meta")
            for n, entry in entries.items()
        }

    def pieces(self, name: str) -> Iterator[memoryview]:
        yield from _stored_pieces(self._tensors, name)

    def tensor(self, name: str) -> Tensor:
        return self._tensors[name]


def _stored_pieces(tensors: StoredTensors, name: str) -> Iterator[memoryview]:
    for _, piece in tensors.chunks(name, 0, tensors.entries[name].numel):
        yield from iter_bytes(piece)


class CastWeights(OnDemand):
    """Stored tensors in the dtypes of their namesakes in ``like``, read on access."""

    def __init__(self, tensors: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self._like = like

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name].to(self._like[name].dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._like)

    def __len__(self) -> int:
        return len(self._like)
