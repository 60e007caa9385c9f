"""Small models of many architectures: the configuration classes of transformers, with random
weights.

Windows and chunks are shorter than the sequences that are read,
``original_max_position_embeddings`` lies between the shortest and the longest of them, every kind
of layer is there, and the vocabulary is larger than the tokenizer's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import tokenizers
import torch
import transformers
from torch import nn

from rlearner_text.config import TinyModel
from rlearner_text.tiny import END_OF_TURN, PAD, _write_tokenizer
from rlearner_text.transformers_import import import_transformers

VOCABULARY: Final = 128  # the tokenizer has fewer tokens: 25 rows of the embeddings are padding
POSITIONS: Final = 256
WINDOW: Final = 11
ORIGINAL: Final = 40  # positions before the factors of longrope change
# of matrices: three times the usual, so that distributions are far from uniform
SPREAD: Final = 0.06

Kind = str  # dense, moe, hybrid or vision

_SIZES: Final[Mapping[str, Any]] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": POSITIONS,
    "tie_word_embeddings": False,
}  # fmt: skip


@dataclass(frozen=True)
class Architecture:
    """A family, small.

    Attributes:
        name: of the row; the model_type, and after a dot what is special about it.
        settings: of its configuration class, added to the common ones; None removes one.
        parts: settings of nested configurations, by name, with the common ones in ``text_config``.
        required: whether people train it so often that it must work.
        when: settings of config.json, by dotted path, that tell this row from the plain one of its
            model_type.
    """

    name: str
    kind: Kind = "dense"
    settings: Mapping[str, Any] = field(default_factory=dict)
    parts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    required: bool = False
    when: Mapping[str, Any] = field(default_factory=dict)

    @property
    def model_type(self) -> str:
        """The ``model_type`` in config.json."""
        return self.name.partition(".")[0]


def build(
    architecture: Architecture,
    folder: Path,
    dtype: str = "float32",
    seed: int = 0,
    sizes: Mapping[str, Any] = MappingProxyType({}),
) -> Path:
    """Write a model with random weights of a dtype, and its tokenizer, into a folder.

    Args:
        sizes: settings that replace the common ones, not the architecture's own.
    """
    import_transformers()
    folder.mkdir(parents=True)
    _write_tokenizer(folder, TinyModel(max_position_embeddings=POSITIONS))
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    end = tokenizer.token_to_id(END_OF_TURN)
    pad = tokenizer.token_to_id(PAD)
    assert end is not None
    assert pad is not None
    config = configuration(architecture, end, pad, sizes)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if architecture.kind == "vision":  # as it is published, with all its parts
        model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    sharpen(model, seed)
    model.generation_config = transformers.GenerationConfig(
        do_sample=True, eos_token_id=[end], pad_token_id=pad
    )
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    return folder


def configuration(
    architecture: Architecture, end: int, pad: int, sizes: Mapping[str, Any] = MappingProxyType({})
) -> Any:
    """Return the configuration of a small model, see ``build``."""
    common = {**_SIZES, **sizes}
    special = {"bos_token_id": None, "eos_token_id": end, "pad_token_id": pad}
    if architecture.parts:
        nested = {name: dict(values) for name, values in architecture.parts.items()}
        nested["text_config"] = merged({**common, **special}, nested.get("text_config", {}))
        return transformers.AutoConfig.for_model(
            architecture.model_type, **nested, **architecture.settings
        )
    settings = merged({**common, **special}, architecture.settings)
    return transformers.AutoConfig.for_model(architecture.model_type, **settings)


def merged(base: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with others added; None removes one, but for token ids."""
    return {
        name: value
        for name, value in {**base, **more}.items()
        if value is not None or name.endswith("_id")
    }


@torch.no_grad()
def sharpen(model: nn.Module, seed: int) -> None:
    """Spread the matrices' weights, and give norms and biases values that a mistake would show in."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() >= 2 and "conv" not in name and "A_log" not in name:
            parameter.copy_(SPREAD * noise)
        elif name.endswith(("norm.weight", "bias", "sinks")):
            parameter.add_(0.1 * noise)
