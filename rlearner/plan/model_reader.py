"""Reads the sizes of a model from its config.json: the model is built on the meta device, so nothing is loaded."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any, Final

from broker.errors import ConfigError
from rlearner.plan.facts import ModelFacts
from rlearner_text.config import ModelSection
from rlearner_text.hub import tokenizer_folder
from rlearner_text.transformers_import import import_transformers

EXPERT: Final = re.compile(r"\.experts\.")


def read_model(section: ModelSection) -> ModelFacts:
    """Return the sizes of ``model.path``, or of the small model that a run makes without one.

    Raises:
        ConfigError: if there is no model.
        UserError: if its passes cannot be traced.
    """
    if section.path is not None:
        return read_folder(tokenizer_folder(section.path), section.path, section)
    from rlearner_text.tiny import build_tiny

    with tempfile.TemporaryDirectory() as folder:
        build_tiny(Path(folder) / "tiny", section.tiny, dtype=section.dtype)
        return read_folder(Path(folder) / "tiny", "the model of model.tiny", section)


def read_folder(folder: Path, name: str, section: ModelSection) -> ModelFacts:
    """Return the sizes of the model in a folder with a config.json."""
    import torch

    import_transformers()
    from transformers import AutoConfig, AutoModelForCausalLM

    from rlearner.plan.activation_trace import blocks_of, trace

    trusted = section.trust_remote_code
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trusted)
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(
                config, dtype=getattr(torch, section.dtype), trust_remote_code=trusted
            )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        allowed = f"transformers cannot build a causal language model from its config.json: {_one_line(error)}"
        raise ConfigError("model.path", name, allowed) from error
    text = model.config.get_text_config()
    blocks, embedding, head = blocks_of(model), model.get_input_embeddings().weight, model.get_output_embeddings()
    if head is None:
        raise ConfigError("model.path", name, f"{type(model).__name__} has no output embeddings: not a language model")
    sizes = {parameter: parameter.numel() for parameter in model.parameters()}
    per_block = tuple(sum(parameter.numel() for parameter in block.parameters()) for block in blocks)
    total, experts = sum(sizes.values()), _unused(model, text)
    activations, traced = trace(model.eval(), int(text.hidden_size))
    linears = [layer for block in blocks for layer in block.modules() if isinstance(layer, torch.nn.Linear)]
    return ModelFacts(
        path=name,
        itemsize=model.dtype.itemsize,
        blocks=per_block,
        embedding=embedding.numel(),
        outside=total - sum(per_block) - embedding.numel(),
        largest=max(sizes.values()),
        active=total - experts,
        tied=head.weight is embedding,
        vocab=int(head.weight.shape[0]),
        heads=traced.heads[0],
        kv_heads=traced.heads[1],
        kv_bytes=traced.kv,
        linears=tuple((layer.in_features, layer.out_features) for layer in linears),
        activations=activations,
    )


def _unused(model: Any, config: Any) -> int:
    """Return the parameters of experts that a token does not visit."""
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    if not experts:
        return 0
    total = sum(parameter.numel() for name, parameter in model.named_parameters() if EXPERT.search(name))
    return total - total * int(config.num_experts_per_tok) // int(experts)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
