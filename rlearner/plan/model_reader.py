"""Reads the sizes of a model from its config.json; built on the meta device, it loads nothing."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from broker.errors import ConfigError
from learner.config import LoraSection
from rlearner.plan.facts import ModelFacts, Part
from rlearner_text.config import ModelSection
from rlearner_text.hub import tokenizer_folder
from rlearner_text.transformers_import import import_transformers

EXPERT: Final = re.compile(r"\.experts\.")
# Names in configurations, of a layer's experts and of those that a token visits.
_COUNTS: Final = (
    ("num_experts", "num_local_experts", "n_routed_experts"),
    ("num_experts_per_tok", "top_k_experts"),
)


def read_model(section: ModelSection, lora: LoraSection | None = None) -> ModelFacts:
    """Return the sizes of ``model.path``, or of the small model that a run makes without one.

    Raises:
        ConfigError: if there is no model.
        UserError: if its passes cannot be traced.
    """
    if section.path is not None:
        return read_folder(tokenizer_folder(section.path), section.path, section, lora)
    from rlearner_text.tiny import build_tiny

    with tempfile.TemporaryDirectory() as folder:
        build_tiny(Path(folder) / "tiny", section.tiny, dtype=section.dtype)
        return read_folder(Path(folder) / "tiny", "the model of model.tiny", section, lora)


def read_folder(
    folder: Path, name: str, section: ModelSection, lora: LoraSection | None = None
) -> ModelFacts:
    """Return the sizes of the model in a folder with a config.json, with adapters of ``lora``."""
    import torch

    import_transformers()
    from transformers import AutoConfig, AutoModelForCausalLM

    from rlearner.plan.activation_trace import add_adapters, blocks_of, trace_model

    trusted = section.trust_remote_code
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trusted)
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(
                config, dtype=getattr(torch, section.dtype), trust_remote_code=trusted
            )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        allowed = (
            "transformers cannot build a causal language model from its config.json: "
            f"{_one_line(error)}"
        )
        raise ConfigError("model.path", name, allowed) from error
    text = model.config.get_text_config()
    blocks = blocks_of(model)
    embedding = model.get_input_embeddings().weight
    head = model.get_output_embeddings()
    if head is None:
        raise ConfigError(
            "model.path",
            name,
            f"{type(model).__name__} has no output embeddings: not a language model",
        )
    per_block = tuple(
        sum(parameter.numel() for parameter in block.parameters()) for block in blocks
    )
    total = sum(parameter.numel() for parameter in model.parameters())
    unused = _unused_parameters(model, text)
    if lora is not None:
        add_adapters(model, lora.rank, lambda layer: is_target(layer, lora))
    activations, traced = trace_model(model.eval(), int(text.hidden_size))
    linears = [
        (path.rpartition(".")[2], layer.in_features, layer.out_features)
        for block in blocks
        for path, layer in block.named_modules()
        if isinstance(layer, torch.nn.Linear)
    ]
    linears += [size for block in blocks for size in _stacked_experts(block)]
    return ModelFacts(
        path=name,
        architecture=type(model).__name__,
        itemsize=model.dtype.itemsize,
        blocks=per_block,
        embedding=embedding.numel(),
        outside=total - sum(per_block) - embedding.numel(),
        active=total - unused,
        tied=head.weight is embedding,
        vocab=int(head.weight.shape[0]),
        heads=traced.heads[0],
        kv_heads=traced.heads[1],
        kv_bytes=traced.kv,
        linears=tuple(linears),
        activations=activations,
    )


def _stacked_experts(block: Any) -> Iterator[tuple[str, int, int]]:
    """Yield the matrices of a block's experts, with inputs and outputs of all experts together."""
    for module in block.modules():
        if "experts" in type(module).__name__.lower():
            for name, weight in module.named_parameters(recurse=False):
                if weight.ndim == 3:
                    experts, outputs, inputs = weight.shape
                    yield name, experts * inputs, experts * outputs


def is_target(layer: str, lora: LoraSection) -> bool:
    """Return whether a linear layer in a block, by its last name, gets an adapter."""
    return lora.target_modules == "all-linear" or layer in lora.target_modules


def reward_parts(path: str, dtype: str) -> Part:
    """Return the weights of a reward model, read from its config.json.

    Raises:
        ConfigError: if there is no model.
    """
    import torch

    import_transformers()
    from transformers import AutoConfig, AutoModel

    kind = torch.bfloat16 if dtype == "auto" else getattr(torch, dtype)
    try:
        config = AutoConfig.from_pretrained(tokenizer_folder(path, "reward_model.path"))
        with torch.device("meta"):
            model: Any = AutoModel.from_config(config, dtype=kind)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ConfigError(
            "reward_model.path", path, f"transformers cannot build it: {_one_line(error)}"
        ) from error
    number = sum(parameter.numel() for parameter in model.parameters())
    return Part(path, number * kind.itemsize, f"{number:,} parameters x {kind.itemsize} bytes")


def _unused_parameters(model: Any, config: Any) -> int:
    """Return the parameters of experts that a token does not visit."""
    experts, visited = (
        next(filter(None, (getattr(config, name, None) for name in names)), 0) for names in _COUNTS
    )
    if not experts:
        return 0
    total = sum(
        parameter.numel() for name, parameter in model.named_parameters() if EXPERT.search(name)
    )
    return int(total - total * visited // experts)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
