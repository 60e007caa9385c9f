"""Tiny process reward models on disk, and episodes for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3ForTokenClassification

from rewardhub.rewards.base import Sample, SampleTurn
from rlearner_text.config import TinyModel
from rlearner_text.tiny import _write_tokenizer
from rlearner_text.tokenizer import Tokenizer

# Of the characters of the tiny vocabulary, the one that closes steps.
SEPARATOR = "#"


def write_model(folder: Path, kind: type, *, seed: int = 5, **fields: Any) -> Path:
    """Write a random model of a class of Qwen3, with the tiny tokenizer and its chat template."""
    folder.mkdir(exist_ok=True)
    _write_tokenizer(folder, TinyModel())
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=Tokenizer.load(folder).vocab_size, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, max_position_embeddings=512, **fields,
    )  # fmt: skip
    model = kind(config)
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.3)
    model.save_pretrained(folder)
    return folder


def write_classifier(folder: Path, num_labels: int = 2) -> Path:
    return write_model(folder, Qwen3ForTokenClassification, num_labels=num_labels)


def write_language_model(folder: Path, seed: int = 5) -> Path:
    return write_model(folder, Qwen3ForCausalLM, seed=seed)


def write_deep_head(folder: Path) -> Path:
    """Write a model with the head of Qwen2.5-Math-PRM: linear, ReLU, linear to two classes."""
    write_classifier(folder)
    file = folder / "model.safetensors"
    state = {name: value for name, value in load_file(file).items() if "score" not in name}
    torch.manual_seed(6)
    head = {
        "score.0.weight": torch.randn(16, 16),
        "score.0.bias": torch.randn(16),
        "score.2.weight": torch.randn(2, 16),
        "score.2.bias": torch.randn(2),
    }
    save_file(state | head, file, metadata={"format": "pt"})
    return folder


def make_sample(*turns: str, prompt: str = "2 + 2?") -> Sample:
    """Return an episode in which the user answers each turn but the last with ``go on``."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": prompt}]
    places = []
    for turn in turns:
        places.append(len(messages))
        messages += [{"role": "assistant", "content": turn}, {"role": "user", "content": "go on"}]
    return Sample(
        domain="d", task_index=1, prompt=prompt, response=turns[-1], reference="", reward=0.0, reward_parts={},
        success=False, end="terminated", num_turns=len(turns), num_tokens=1, metrics={}, messages=messages[:-1],
        turns=[SampleTurn(message=place, reward=0.0, valid=True, num_tokens=1) for place in places],
        max_turns=len(turns),
    )  # fmt: skip
