"""Writes models that transformers loads from parts, a few megabytes or one merged weight at a time."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from torch import Tensor

from broker.weights.adapter import MergedModel
from broker.weights.memory.on_demand import OnDemand
from learner.backends.parts.names import ADAPTER, MODEL
from learner.backends.parts.part_file import DamagedFileError
from learner.backends.parts.stored import StoredTensors
from learner.backends.parts.writing import CODES, DTYPES, header, pieces
from rlearner_text.hub import model_folder
from rlearner_text.transformers_import import import_transformers

log = logging.getLogger(__name__)

MAX_SHARD_BYTES: Final = 5 << 30
INDEX: Final = "model.safetensors.index.json"
ADAPTER_FOLDER: Final = "adapter"  # the adapters in peft's format
ADAPTER_WEIGHTS: Final = "adapter_model.safetensors"


class StoredBase(msgspec.Struct, frozen=True):
    """The frozen model below the adapters."""

    path: str  # folder or hub name
    targets: list[str]  # last names of the layers with adapters
    scale: float


class StoredModel(msgspec.Struct, frozen=True):
    """What the weights in the parts are."""

    weights: dict[str, tuple[str, list[int]]]  # dtype as safetensors names it, and shape, in order
    same_names: bool  # whether transformers' files have these names and shapes, too
    base: StoredBase | None = None  # of adapters, which alone are in the parts

    def on_meta(self) -> dict[str, Tensor]:
        """Return the weights on the meta device."""
        return {
            name: torch.empty(shape, dtype=DTYPES[code], device="meta") for name, (code, shape) in self.weights.items()
        }

    @property
    def nbytes(self) -> int:
        """Bytes of all weights."""
        return sum(torch.Size(shape).numel() * DTYPES[code].itemsize for code, shape in self.weights.values())


def write_description(folder: Path, module: Any, shapes: Mapping[str, Tensor], base: StoredBase | None) -> StoredModel:
    """Write a live model's configuration as ``save_pretrained`` does, and describe its weights.

    Args:
        shapes: of all weights, on the meta device.
    """
    config = module.config
    config.dtype = str(module.dtype).removeprefix("torch.")
    config.architectures = [type(module).__name__.removeprefix("FSDP")]
    if module.is_remote_code():
        from transformers.dynamic_module_utils import custom_object_save

        custom_object_save(module, folder, config=config)
    config.save_pretrained(folder)
    if module.can_generate():
        module.generation_config.save_pretrained(folder)
    weights = {name: (CODES[tensor.dtype], list(tensor.shape)) for name, tensor in shapes.items()}
    return StoredModel(weights, keeps_names(module, shapes), base)


def keeps_names(module: Any, shapes: Mapping[str, Tensor]) -> bool:
    """Return whether transformers stores the weights of a model as they are; others it renames, splits or merges."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, revert_weight_conversion

    conversions = getattr(module, "_weight_conversions", None) or get_model_conversion_mapping(module, add_legacy=False)
    if not all(isinstance(one, WeightRenaming) for one in conversions):
        return False
    return not conversions or set(revert_weight_conversion(module, dict(shapes))) == set(shapes)


def write_model(
    model: StoredModel, parts: Sequence[str | Path], folder: Path, *, max_shard_bytes: int = MAX_SHARD_BYTES
) -> None:
    """Write all weights into a folder that has the configuration; adapters are merged in.

    Raises:
        DamagedFileError: if a part is missing or damaged.
        UserError: if the model below the adapters is not there.
        OSError: if a file cannot be written.
    """
    stored = StoredTensors(parts)
    source = _WholeWeights(model, stored) if model.base is None else _MergedWeights(model, model.base, _factors(stored))
    if not model.same_names or not source.complete:
        _write_converted(model, source, folder, max_shard_bytes)
        return
    shards = shards_of(model, max_shard_bytes)
    files = [folder / shard_name(index, len(shards)) for index in range(len(shards))]
    like = model.on_meta()
    for file, names in zip(files, shards, strict=True):
        _write(file, {name: like[name] for name in names}, source.pieces)
    if len(files) > 1:
        where = {name: file.name for file, names in zip(files, shards, strict=True) for name in names}
        about = {"metadata": {"total_size": model.nbytes}, "weight_map": where}
        (folder / INDEX).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


def write_adapters(model: StoredModel, parts: Sequence[str | Path], folder: Path) -> None:
    """Write the adapters, if there are any, in peft's format next to their configuration.

    Raises:
        DamagedFileError: if a part is missing or damaged.
        OSError: if the file cannot be written.
    """
    if model.base is not None:
        factors = _factors(StoredTensors(parts))
        _write(folder / ADAPTER_FOLDER / ADAPTER_WEIGHTS, factors, lambda name: pieces(factors[name]))


def _factors(stored: StoredTensors) -> dict[str, Tensor]:
    return {name.removeprefix(ADAPTER): stored[name] for name in stored if name.startswith(ADAPTER)}


def shards_of(model: StoredModel, max_bytes: int) -> list[list[str]]:
    """Divide the weights, in order, among files of at most ``max_bytes``, or of one larger weight."""
    shards: list[list[str]] = []
    room = 0
    for name, (code, shape) in model.weights.items():
        size = torch.Size(shape).numel() * DTYPES[code].itemsize
        if size > room or not shards:
            shards.append([])
            room = max_bytes
        shards[-1].append(name)
        room -= size
    return shards


def shard_name(index: int, count: int) -> str:
    """Return the name that transformers gives a file of a model."""
    return "model.safetensors" if count == 1 else f"model-{index + 1:05d}-of-{count:05d}.safetensors"


class _WholeWeights:
    """The weights in the parts."""

    def __init__(self, model: StoredModel, stored: StoredTensors) -> None:
        self._stored = stored
        if missing := [name for name in model.weights if MODEL + name not in stored]:
            raise DamagedFileError(f"the parts lack {len(missing)} weights, the first is {missing[0]}")
        self.complete = True

    def pieces(self, name: str) -> Iterator[memoryview]:
        """Yield a weight's bytes."""
        name = MODEL + name
        for _, piece in self._stored.chunks(name, 0, self._stored.entries[name].numel):
            yield from pieces(piece)

    def tensors(self) -> dict[str, Tensor]:
        """Return all weights."""
        return {name.removeprefix(MODEL): self._stored[name] for name in self._stored if name.startswith(MODEL)}


class _MergedWeights:
    """The base's weights with the adapters merged in; ``complete`` unless the base's files have other names."""

    def __init__(self, model: StoredModel, base: StoredBase, factors: Mapping[str, Tensor]) -> None:
        self._path, self._like = model_folder(base.path), model.on_meta()
        self._merged = partial(MergedModel, factors=factors, targets=base.targets, scale=base.scale)
        stored = StoredTensors(sorted(Path(self._path).glob("*.safetensors")))
        same = {name: stored.entries[name].shape for name in self._like if name in stored}
        self.complete = same == {name: tuple(like.shape) for name, like in self._like.items()}
        self._weights = self._merged(CastWeights(stored, self._like))

    def pieces(self, name: str) -> Iterator[memoryview]:
        """Yield a merged weight's bytes."""
        yield from pieces(self._weights[name].contiguous())

    def tensors(self) -> dict[str, Tensor]:
        """Return all merged weights, whatever the names in the base's files."""
        from transformers import AutoModelForCausalLM

        dtype = next(iter(self._like.values())).dtype
        module = AutoModelForCausalLM.from_pretrained(self._path, dtype=dtype, use_safetensors=True)
        held = module.state_dict()
        return dict(self._merged({name: held[name] for name in self._like}))


class CastWeights(OnDemand):
    """Stored tensors in the dtypes of their namesakes in ``like``, read on access."""

    def __init__(self, stored: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> None:
        self._stored, self._like = stored, like

    def __getitem__(self, name: str) -> Tensor:
        return self._stored[name].to(self._like[name].dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._like)

    def __len__(self) -> int:
        return len(self._like)


def _write(file: Path, like: Mapping[str, Tensor], bytes_of: Callable[[str], Iterator[memoryview]]) -> None:
    """Write tensors of the shapes and dtypes of ``like``."""
    names = sorted(like, key=lambda name: -like[name].itemsize)  # aligned; otherwise in order
    with file.open("wb") as opened:
        opened.write(header([(name, like[name].dtype, list(like[name].shape)) for name in names], {}))
        for name in names:
            for piece in bytes_of(name):
                opened.write(piece)


def _write_converted(
    model: StoredModel, source: _WholeWeights | _MergedWeights, folder: Path, max_shard_bytes: int
) -> None:
    """Let transformers write the weights, which it stores otherwise than it holds them; all are in memory."""
    import_transformers()
    from transformers import AutoConfig, AutoModelForCausalLM

    log.info("%s: %.1f GiB are held in memory, to be converted", folder, model.nbytes / 2**30)
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    module.save_pretrained(folder, state_dict=source.tensors(), max_shard_size=max_shard_bytes)
