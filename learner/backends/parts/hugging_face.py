"""Writes models that transformers loads, from parts, a few megabytes or one weight at a time."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from learner.backends.parts.names import ADAPTER
from learner.backends.parts.original import find_original
from learner.backends.parts.sources import (
    ConvertedWeights,
    KeptWeights,
    MergedWeights,
    StoredWeights,
    WeightSource,
)
from learner.backends.parts.stored import INDEX, StoredTensors
from learner.backends.parts.stored_model import StoredBase, StoredModel
from learner.backends.parts.writing import CODES, encode_header, iter_bytes
from rlearner_text.stored_form import keeps_names, use_conversions

log = logging.getLogger(__name__)

MAX_SHARD_BYTES: Final = 5 << 30
# The adapters in peft's format.
ADAPTER_FOLDER: Final = "adapter"
ADAPTER_WEIGHTS: Final = "adapter_model.safetensors"


def write_description(
    folder: Path,
    module: Any,
    shapes: Mapping[str, Tensor],
    *,
    base: StoredBase | None,
    names: Collection[str],
    untrained: Collection[str],
    path: str,
) -> StoredModel:
    """Write a live model's configuration as ``save_pretrained`` does, and describe its weights.

    Args:
        shapes: of all weights, on the meta device.
        names: of the weights without adapters, tied ones under each of their names.
        untrained: those of the names that never change.
        path: folder or hub name of the model that the run started from.
    """
    original = find_original(path)
    kept_names: list[str] = []
    if original.tensors:
        kept_names = use_conversions(module, list(original.tensors), names, untrained)
    config = module.config
    config.dtype = str(module.dtype).removeprefix("torch.")
    config.architectures = [type(module).__name__.removeprefix("FSDP")]
    if module.is_remote_code():
        from transformers.dynamic_module_utils import custom_object_save

        custom_object_save(module, folder, config=config)
    config.save_pretrained(folder)
    original_config = original.config
    if kept_names or original_config.get("model_type", config.model_type) != config.model_type:
        original.write_config(folder, config.dtype)
    if module.can_generate():
        module.generation_config.save_pretrained(folder)
    weights = {name: (CODES[tensor.dtype], list(tensor.shape)) for name, tensor in shapes.items()}
    return StoredModel(weights, keeps_names(module, shapes), base, original.path, kept_names)


def write_model(
    model: StoredModel,
    parts: Sequence[str | Path],
    folder: Path,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write all weights into a folder that has the configuration; adapters are merged in.

    What is never trained is copied from the original files, byte for byte.

    Raises:
        DamagedFileError: if a part is missing or damaged.
        UserError: if the model below the adapters, or a file to copy from, is not there.
        OSError: if a file cannot be written.
    """
    tensors = StoredTensors(parts)
    source: WeightSource = StoredWeights(model, tensors)
    if model.base is not None:
        source = MergedWeights(model, model.base, _read_factors(tensors))
    sources: list[WeightSource] = [
        source if model.same_names else ConvertedWeights(model, source, folder)
    ]
    if model.kept:
        sources.append(KeptWeights(model))
    origins = {name: origin for origin in sources for name in origin.shapes}
    like = {name: tensor for origin in sources for name, tensor in origin.shapes.items()}
    shards = shards_of(like, max_shard_bytes)
    files = [folder / shard_name(index, len(shards)) for index in range(len(shards))]
    for file, names in zip(files, shards, strict=True):
        _write_tensors(
            file, {name: like[name] for name in names}, lambda name: origins[name].pieces(name)
        )
    if len(files) > 1:
        weight_map = {
            name: file.name for file, names in zip(files, shards, strict=True) for name in names
        }
        total = sum(tensor.nbytes for tensor in like.values())
        about = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


def write_adapters(model: StoredModel, parts: Sequence[str | Path], folder: Path) -> None:
    """Write the adapters, if there are any, in peft's format next to their configuration.

    Raises:
        DamagedFileError: if a part is missing or damaged.
        OSError: if the file cannot be written.
    """
    if model.base is not None:
        names = model.base.exported_names
        factors = {
            names.get(name, name): factor
            for name, factor in _read_factors(StoredTensors(parts)).items()
        }
        _write_tensors(
            folder / ADAPTER_FOLDER / ADAPTER_WEIGHTS,
            factors,
            lambda name: iter_bytes(factors[name]),
        )


def _read_factors(tensors: StoredTensors) -> dict[str, Tensor]:
    return {
        name.removeprefix(ADAPTER): tensors[name] for name in tensors if name.startswith(ADAPTER)
    }


def shards_of(like: Mapping[str, Tensor], max_bytes: int) -> list[list[str]]:
    """Divide tensors, in order, among files of at most ``max_bytes``, or of one larger tensor."""
    shards: list[list[str]] = []
    room = 0
    for name, tensor in like.items():
        if tensor.nbytes > room or not shards:
            shards.append([])
            room = max_bytes
        shards[-1].append(name)
        room -= tensor.nbytes
    return shards


def shard_name(index: int, count: int) -> str:
    """Return the name that transformers gives a file of a model."""
    if count == 1:
        return "model.safetensors"
    return f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def _write_tensors(
    file: Path, like: Mapping[str, Tensor], bytes_of: Callable[[str], Iterator[memoryview]]
) -> None:
    """Write tensors of the shapes and dtypes of ``like``."""
    # The largest items come first, so that all are aligned; otherwise in order.
    names = sorted(like, key=lambda name: -like[name].itemsize)
    with file.open("wb") as output:
        output.write(
            encode_header([(name, like[name].dtype, list(like[name].shape)) for name in names], {})
        )
        for name in names:
            for piece in bytes_of(name):
                output.write(piece)
