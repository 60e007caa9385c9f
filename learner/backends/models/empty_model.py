"""Builds a model without its weights, and fills it from files, whole or each rank's part."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from broker.errors import ConfigError
from broker.weights.finite import first_non_finite
from learner.backends.models.auto_classes import LANGUAGE_MODEL, AutoClass, import_auto_class
from learner.backends.parts.names import MODEL, STATE_FOLDER
from learner.backends.parts.part_file import DamagedFileError
from learner.backends.parts.stored import StoredTensors, weights_in_files
from rlearner_text.config import ModelSection
from rlearner_text.hub import model_folder
from rlearner_text.stored_form import keeps_names
from rlearner_text.transformers_import import import_transformers

log = logging.getLogger(__name__)

# Takes a parameter's name and the parameter; returns its successor.
Replace = Callable[[str, Any], Tensor]


@dataclass(frozen=True)
class EmptyModel:
    """A model with parameters on the meta device and buffers in memory, and its weights' files.

    Attributes:
        path: as the user named the model.
    """

    module: Any
    weights: StoredTensors
    path: str

    def read(self, name: str, start: int, into: Tensor) -> None:
        """Fill a tensor with a weight's elements from ``start`` on.

        Raises:
            ConfigError: if one is NaN or infinite.
        """
        self.weights.read(name, start, into)
        if problem := first_non_finite({name: into}):
            raise ConfigError("model.path", self.path, f"a model of finite weights: {problem}")

    def fill(self, device: torch.device) -> None:
        """Read all weights."""

        def whole(name: str, tensor: Any) -> Tensor:
            weight = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            self.read(name, 0, weight)
            if isinstance(tensor, nn.Parameter):
                return nn.Parameter(weight, tensor.requires_grad)
            return weight

        self.replace(whole, device)

    def replace(self, parameter: Replace, device: torch.device) -> None:
        """Replace the parameters, tied ones by the same, and read the stored buffers."""
        saved = {name for name, _ in self.module.named_buffers()} & set(self.module.state_dict())
        replacements: dict[int, Any] = {}
        for path, owner in self.module.named_modules():
            for key, tensor in [*owner._parameters.items()]:
                if tensor is not None:
                    if id(tensor) not in replacements:
                        # The old tensor is kept, so that no new one gets its id.
                        replacements[id(tensor)] = (
                            parameter(f"{path}.{key}".removeprefix("."), tensor),
                            tensor,
                        )
                    owner._parameters[key] = replacements[id(tensor)][0]
            for key, tensor in [*owner._buffers.items()]:
                if tensor is not None:
                    owner._buffers[key] = tensor.to(device)
                    if (name := f"{path}.{key}".removeprefix(".")) in saved:
                        self.read(name, 0, owner._buffers[key])


def refuse_non_finite(
    path: str, shares: Mapping[str, Tensor], weights: Mapping[str, Tensor], device: torch.device
) -> None:
    """Check the parts of a model's weights that the ranks have read; collective.

    All ranks raise the same: rank 0 reports errors for all, and would wait for a rank that ends.

    Args:
        path: as the user named the model.
        shares: what this rank has read.
        weights: all weights, whole, read on access.
        device: of the ranks' group.

    Raises:
        ConfigError: if a weight is NaN or infinite.
    """
    names = sorted(weights)
    problem = first_non_finite(shares)
    number = names.index(problem.partition(" ")[0]) if problem else len(names)
    first = torch.tensor(number, device=device)
    dist.all_reduce(first, dist.ReduceOp.MIN)
    if (number := int(first)) < len(names):
        problem = first_non_finite({names[number]: weights[names[number]]})
        raise ConfigError("model.path", path, f"a model of finite weights: {problem}")


def open_parts(
    path: str, section: ModelSection, kind: AutoClass = LANGUAGE_MODEL
) -> EmptyModel | None:
    """Return the model of a checkpoint whose weights are only in parts, None for other folders.

    Args:
        kind: class of transformers that loads it.

    Raises:
        ConfigError: if its configuration or parts are missing or damaged.
    """
    if (weights := weights_in_parts(path)) is None:
        return None
    module = build_empty(path, section, kind)
    if problem := _layout_difference(module, weights):
        raise ConfigError("model.path", path, f"its parts do not fit its config.json: {problem}")
    return EmptyModel(module, weights, path)


def weights_in_parts(path: str) -> StoredTensors | None:
    """Return the weights of a checkpoint that has them only in parts, None for other folders.

    Raises:
        ConfigError: if its parts are missing or damaged.
    """
    folder = Path(path).expanduser()
    if not (folder / STATE_FOLDER / "learner.json").is_file() or any(folder.glob("*.safetensors")):
        return None
    try:
        return StoredTensors(sorted((folder / STATE_FOLDER).glob("part-*.safetensors"))).below(
            MODEL
        )
    except DamagedFileError as error:
        raise ConfigError("model.path", path, str(error)) from None


def open_empty(path: str, section: ModelSection) -> EmptyModel | str:
    """Return a model whose weights can be read in slices, or why they cannot."""
    if (model := open_parts(path, section)) is not None:
        return model
    folder = Path(model_folder(path, trust_remote_code=section.trust_remote_code))
    module = build_empty(path, section)
    if getattr(module.config, "quantization_config", None) is not None:
        return "its weights are quantized"
    if module._keep_in_fp32_modules_strict and section.dtype != "float32":
        return "some of its weights stay in float32"
    if not keeps_names(
        module, {name: tensor.detach() for name, tensor in module.named_parameters()}
    ):
        return "transformers stores its weights under other names"
    try:
        weights = weights_in_files(folder)
    except DamagedFileError as error:
        return str(error)
    return _layout_difference(module, weights) or EmptyModel(module, weights, path)


def build_empty(path: str, section: ModelSection, kind: AutoClass = LANGUAGE_MODEL) -> Any:
    """Build a model in evaluation mode with computed buffers and parameters on the meta device.

    Args:
        kind: class of transformers that loads it.

    Raises:
        ConfigError: if transformers cannot read the configuration.
    """
    from huggingface_hub.errors import StrictDataclassError

    import_transformers()
    from transformers import AutoConfig, GenerationConfig

    folder = model_folder(path, trust_remote_code=section.trust_remote_code)
    trust = {"trust_remote_code": section.trust_remote_code}
    try:
        config = AutoConfig.from_pretrained(folder, **trust)
        with _parameters_on_meta():
            module = import_auto_class(kind).from_config(
                config, dtype=getattr(torch, section.dtype), **trust
            )
        if (Path(folder) / "generation_config.json").is_file():
            module.generation_config = GenerationConfig.from_pretrained(folder)
    except (OSError, ValueError, KeyError, RuntimeError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(
            "model.path", path, f"transformers cannot build a model from it: {reason}"
        ) from error
    return module.eval()


def _layout_difference(module: Any, weights: StoredTensors) -> str:
    """Return how the stored weights differ from the model's in names or shapes."""
    parameters: Mapping[str, Any] = dict(module.named_parameters())
    buffers = {name: tensor for name, tensor in module.state_dict().items() if not tensor.is_meta}
    for name, tensor in {**parameters, **buffers}.items():
        if (entry := weights.entries.get(name)) is None:
            return f"{name} is missing"
        if entry.shape != tuple(tensor.shape):
            return f"{name} has shape {entry.shape}, not {tuple(tensor.shape)}"
    tied_names = [
        name for name in module.state_dict() if name not in parameters and name not in buffers
    ]
    return next((f"{name} is tied, and stored" for name in tied_names if name in weights), "")


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Move parameters to the meta device as modules register them, before memory is touched."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None and not parameter.is_meta:
            module._parameters[name] = nn.Parameter(
                parameter.detach().to("meta"), parameter.requires_grad
            )

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
