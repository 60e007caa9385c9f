"""Translates Hugging Face configurations to Megatron's terms and refuses unsupported models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from broker.errors import ConfigError

# Their layers are all alike, and their tensors have the names that ``mapping`` translates.
SUPPORTED: Final = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
# Their frequencies do not depend on the length, and their cosines are not scaled.
ROPE_TYPES: Final = ("default", "linear", "llama3")


@dataclass(frozen=True)
class ModelSizes:
    """Sizes that ranks divide; ``num_groups`` counts key-value heads."""

    num_layers: int
    num_heads: int
    num_groups: int
    intermediate: int


@dataclass(frozen=True)
class DecoderArchitecture(ModelSizes):
    """Sizes and switches of a decoder whose layers are all alike."""

    hidden: int
    head_dim: int
    vocab: int
    max_positions: int
    eps: float
    qkv_bias: bool  # whether queries, keys and values have a bias
    qk_norm: bool  # whether queries and keys are normalised per head
    tied: bool  # whether the output layer shares the embedding's weights


def architecture_of(config: Any, path: str) -> DecoderArchitecture:
    """Read a transformers configuration; ``path`` is for messages.

    Raises:
        ConfigError: if the model is not of the Llama and Qwen families, or a variant that is not
            supported.
    """
    name = next(iter(config.architectures or []), type(config).__name__)
    check_architecture(name, path)
    if odd := _unsupported_setting(config):
        allowed = f"a plain {name} with train.backend megatron, not one with {odd}; fsdp2 takes it"
        raise ConfigError("model.path", path, allowed)
    return DecoderArchitecture(
        num_layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_groups=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None)
        or config.hidden_size // config.num_attention_heads,
        intermediate=config.intermediate_size,
        vocab=config.vocab_size,
        max_positions=config.max_position_embeddings,
        eps=config.rms_norm_eps,
        qkv_bias=name == "Qwen2ForCausalLM",
        qk_norm=name == "Qwen3ForCausalLM",
        tied=bool(config.tie_word_embeddings),
    )


def _unsupported_setting(config: Any) -> str:
    """Return the first unsupported setting; empty if there is none."""
    rope = config.rope_parameters or {}
    if (kind := rope.get("rope_type", "default")) not in ROPE_TYPES:
        return f"rope_type {kind}"
    if (share := rope.get("partial_rotary_factor", 1.0)) != 1.0:
        return f"partial_rotary_factor {share}"
    if config.hidden_act not in ("silu", "swish"):
        return f"hidden_act {config.hidden_act}"
    if kinds := set(getattr(config, "layer_types", None) or ()) - {"full_attention"}:
        return f"layers of {' and '.join(sorted(kinds))}"
    for switch in ("attention_bias", "mlp_bias"):
        if getattr(config, switch, False):
            return switch
    if getattr(config, "attention_dropout", 0.0):
        return f"attention_dropout {config.attention_dropout}"
    return ""


def check_architecture(name: str, path: str) -> None:
    """Raise ConfigError if a transformers class is not supported."""
    if name not in SUPPORTED:
        raise ConfigError(
            "model.path",
            path,
            f"one of {', '.join(SUPPORTED)} with train.backend megatron, not {name}",
        )


def check_sizes(shape: ModelSizes, tensor_parallel: int, pipeline_parallel: int) -> None:
    """Raise ConfigError if ranks cannot divide the model so, with the values that would work."""
    sizes = {
        "attention heads": shape.num_heads,
        "key-value heads": shape.num_groups,
        "MLP columns": shape.intermediate,
    }
    for kind, count in sizes.items():
        if count % tensor_parallel:
            fitting = [size for size in range(1, shape.num_groups + 1) if can_divide(shape, size)]
            allowed = (
                f"one of {', '.join(map(str, fitting))}: it must divide the model's {count} {kind}"
            )
            raise ConfigError("train.megatron.tensor_parallel", tensor_parallel, allowed)
    if shape.num_layers % pipeline_parallel:
        allowed = f"a divisor of the model's {shape.num_layers} layers"
        raise ConfigError("train.megatron.pipeline_parallel", pipeline_parallel, allowed)


def can_divide(shape: ModelSizes, size: int) -> bool:
    """Return whether ``size`` ranks can divide a layer."""
    return not any(
        count % size for count in (shape.num_heads, shape.num_groups, shape.intermediate)
    )
