"""A model without weights: Hugging Face's names and shapes of its tensors, and its configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from broker.errors import ConfigError
from learner.backends.megatron.architecture import DecoderArchitecture, architecture_of, check_sizes
from learner.backends.megatron.weight_files import WeightFiles
from learner.config import MegatronSection
from rlearner_text.config import ModelSection, check_model_path
from rlearner_text.hub import model_folder
from rlearner_text.transformers_import import import_transformers


@dataclass(frozen=True)
class ModelShell:
    """A model without weights."""

    path: str
    shape: DecoderArchitecture
    module: Any  # transformers' model, on the meta device; its configuration is saved with weights
    inv_freq: Tensor  # frequencies of its rotary positions

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Parameters by Hugging Face's names, tied ones once, on the meta device."""
        return {name: parameter.detach() for name, parameter in self.module.named_parameters()}


def open_shell(path: str, model: ModelSection, section: MegatronSection) -> ModelShell:
    """Open a model without reading its weights.

    Raises:
        ConfigError: if it does not exist, is not supported, cannot be divided as configured, or lacks weights.
    """
    from huggingface_hub.errors import StrictDataclassError

    import_transformers()
    from transformers import AutoConfig, AutoModelForCausalLM

    check_model_path(path)
    try:
        config = AutoConfig.from_pretrained(model_folder(path))
    except (OSError, ValueError, KeyError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError("model.path", path, f"transformers cannot read its configuration: {reason}") from error
    shape = architecture_of(config, path)
    check_sizes(shape, section.tensor_parallel, section.pipeline_parallel)
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, model.dtype)).eval()
    rotary = type(module.model.rotary_emb)(config=config)
    found = ModelShell(path, shape, module, rotary.inv_freq)
    with WeightFiles(path) as files:
        files.refuse(found.tensors)
    return found
