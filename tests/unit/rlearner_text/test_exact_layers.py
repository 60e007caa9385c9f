"""Layers of transformers models that give a token the same bits in any batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import VOCAB, load, make

from rlearner_text.exact.exact_layers import RotaryTable, exact_problem, make_exact


def layers_of(model: Any, ids: torch.Tensor, places: torch.Tensor) -> list[torch.Tensor]:
    """What all layers but attention give for tokens: embeddings, rotations, a block's MLP, head."""
    trunk = model.model
    embedded = trunk.embed_tokens(ids)
    cosine, sine = trunk.rotary_emb(embedded, places)
    block = trunk.layers[0]
    normed = block.post_attention_layernorm(block.input_layernorm(embedded))
    hidden = block.mlp(normed)
    return [cosine, sine, block.self_attn.q_proj(normed), hidden, model.lm_head(hidden)]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@torch.no_grad()
def test_a_token_has_the_same_bits_in_rows_of_any_length(family: str, tmp_path: Path) -> None:
    model = load(make(family, tmp_path))
    assert exact_problem(model) == ""
    make_exact(model, 256)
    ids = torch.randint(0, VOCAB, (1, 200), generator=torch.Generator().manual_seed(0))
    places = torch.arange(200)[None]
    whole = layers_of(model, ids, places)
    for part in (slice(0, 1), slice(37, 38), slice(3, 90), slice(199, 200)):
        own = layers_of(model, ids[:, part], places[:, part])
        for values, expected in zip(own, whole, strict=True):
            assert torch.equal(values, expected[:, part])


@torch.no_grad()
def test_rotations_are_those_of_the_embedding(tmp_path: Path) -> None:
    rotary = load(make("qwen3", tmp_path)).model.rotary_emb
    states = torch.zeros(1, 3, 24)
    places = torch.tensor([[0, 63, 64]])
    expected = rotary(states, places)
    table = RotaryTable(rotary, 128)
    for own, other in zip(table(states, places), expected, strict=True):
        assert own.shape == other.shape
        torch.testing.assert_close(own, other, rtol=0, atol=1e-6)


def test_matrices_outside_linear_layers_are_refused(tmp_path: Path) -> None:
    gpt2 = load(make("gpt2", tmp_path))
    assert exact_problem(gpt2) == "Conv1D multiplies matrices outside linear layers"
    assert "Mixtral" in exact_problem(load(make("mixtral", tmp_path)))


def test_weights_are_moved_to_aligned_memory() -> None:
    model = torch.nn.Linear(4, 4)
    memory = torch.zeros(17)
    model.weight.data = memory[1:].view(4, 4)
    make_exact(model, 8)
    assert model.weight.data_ptr() % 64 == 0
