"""A model without weights: its configuration, its files, and its tensors' names and shapes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from broker.errors import ConfigError
from learner.backends.megatron.architecture import DecoderArchitecture, architecture_of, check_sizes
from learner.backends.models.empty_model import weights_in_parts
from learner.backends.parts.part_file import DamagedFileError
from learner.backends.parts.stored import StoredTensors, weights_in_files
from learner.config import MegatronSection
from rlearner_text.config import ModelSection, check_model_path
from rlearner_text.hub import model_folder
from rlearner_text.transformers_import import import_transformers


@dataclass(frozen=True)
class ModelShell:
    """A model whose weights are in files only."""

    path: str
    shape: DecoderArchitecture
    module: Any  # transformers' model, on the meta device; its configuration is saved with weights
    inv_freq: Tensor  # frequencies of its rotary positions
    weights: StoredTensors

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Parameters by Hugging Face's names, tied ones once, on the meta device."""
        return {name: parameter.detach() for name, parameter in self.module.named_parameters()}


def open_shell(path: str, model: ModelSection, section: MegatronSection) -> ModelShell:
    """Open a model without reading its weights.

    Raises:
        ConfigError: if it does not exist, is not supported, cannot be divided as configured, or
            lacks weights.
    """
    from huggingface_hub.errors import StrictDataclassError

    import_transformers()
    from transformers import AutoConfig, AutoModelForCausalLM

    if (weights := weights_in_parts(path)) is None:
        check_model_path(path)
        weights = _weights_in_files(path)
    try:
        config = AutoConfig.from_pretrained(model_folder(path))
    except (OSError, ValueError, KeyError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(
            "model.path", path, f"transformers cannot read its configuration: {reason}"
        ) from error
    shape = architecture_of(config, path)
    check_sizes(shape, section.tensor_parallel, section.pipeline_parallel)
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, model.dtype)).eval()
    rotary = type(module.model.rotary_emb)(config=config)
    shell = ModelShell(path, shape, module, rotary.inv_freq, weights)
    _check_weights(path, shell.tensors, weights)
    return shell


def _weights_in_files(path: str) -> StoredTensors:
    try:
        return weights_in_files(Path(model_folder(path)))
    except DamagedFileError as error:
        raise ConfigError("model.path", path, f"a model whose files can be read: {error}") from None


def _check_weights(path: str, shapes: Mapping[str, Tensor], weights: StoredTensors) -> None:
    """Raise ConfigError if a weight is missing or has another shape; the message has the first."""
    if not weights:
        raise ConfigError(
            "model.path", path, "a model with weights in *.safetensors with train.backend megatron"
        )
    if missing := sorted(name for name in shapes if name not in weights):
        allowed = f"{len(missing)} of its weights are missing, the first is {missing[0]}"
        raise ConfigError("model.path", path, allowed)
    for name, like in shapes.items():
        shape = weights.entries[name].shape
        expected = tuple(like.shape)
        if shape != expected:
            raise ConfigError(
                "model.path", path, f"its {name} has shape {shape}, its config.json says {expected}"
            )
