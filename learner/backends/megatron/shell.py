"""A model without weights: what it is called in Hugging Face's terms, and what its configuration says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from broker.errors import ConfigError
from learner.backends.megatron.architecture import Architecture, architecture_of, refuse_sizes
from learner.backends.megatron.files import WeightFiles
from learner.config import MegatronSection
from rlearner_text.config import ModelSection, check_model_path
from rlearner_text.transformers_import import import_transformers


@dataclass(frozen=True)
class Shell:
    """
    Attributes:
        module: the model by transformers, on the meta device; written beside weights.
        inv_freq: frequencies of its rotary positions.
    """

    path: str
    shape: Architecture
    module: Any
    inv_freq: Tensor

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Its parameters by Hugging Face's names, tied ones once, on the meta device."""
        return {name: parameter.detach() for name, parameter in self.module.named_parameters()}


def open_shell(path: str, model: ModelSection, section: MegatronSection) -> Shell:
    """Look at a model, without reading its weights.

    Raises:
        ConfigError: there is none, it is of an architecture that is not supported, cannot be divided so, or lacks weights.
    """
    from huggingface_hub.errors import StrictDataclassError

    import_transformers()
    from transformers import AutoConfig, AutoModelForCausalLM

    check_model_path(path)
    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError, KeyError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError("model.path", path, f"transformers cannot read its configuration: {reason}") from error
    shape = architecture_of(config, path)
    refuse_sizes(shape, section.tensor_parallel, section.pipeline_parallel)
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, model.dtype)).eval()
    rotary = type(module.model.rotary_emb)(config=config)
    found = Shell(path, shape, module, rotary.inv_freq)
    with WeightFiles(path) as files:
        files.refuse(found.tensors)
    return found
