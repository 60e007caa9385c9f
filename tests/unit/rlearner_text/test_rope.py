"""Rotary positions fixed for the longest context are those of transformers at that length."""

from __future__ import annotations

import pytest
import torch
import transformers

from rlearner_text.rope import fix_rope

SIZES = {
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 97, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1,
    "initializer_range": 0.3,
}  # fmt: skip
SHORT, LONG = [1.0] * 8, [4.0 + i for i in range(8)]


def phi3(**factors: object) -> torch.nn.Module:
    rope = {
        "rope_type": "longrope",
        "short_factor": SHORT,
        "long_factor": LONG,
        "rope_theta": 1e4,
    } | factors
    config = transformers.Phi3Config(
        **SIZES,
        max_position_embeddings=512,
        original_max_position_embeddings=64,
        rope_parameters=rope,
    )
    torch.manual_seed(0)
    return transformers.Phi3ForCausalLM(config).eval()


def dynamic_llama() -> torch.nn.Module:
    rope = {"rope_type": "dynamic", "factor": 8.0, "rope_theta": 1e4}
    config = transformers.LlamaConfig(**SIZES, max_position_embeddings=64, rope_parameters=rope)
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval()


@torch.no_grad()
def logits(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, use_cache=False).logits[0]


@pytest.mark.parametrize("make", [phi3, dynamic_llama])
@pytest.mark.parametrize("context", [40, 300])
def test_fixed_frequencies_are_those_of_the_longest_context(make, context: int) -> None:
    ids = torch.arange(300)[None] % 90
    whole = logits(make(), ids[:, :context])  # transformers at the run's longest context
    model = make()
    logits(model, ids)  # transformers keeps the frequencies of the longest sequence it has seen
    kinds = fix_rope(model, context)
    assert kinds == (("longrope",) if make is phi3 else ("dynamic",))
    logits(model, ids)
    for length in (10, context):
        assert torch.allclose(logits(model, ids[:, :length]), whole[:length], atol=1e-4)


def test_length_changes_nothing_once_fixed() -> None:
    ids = torch.arange(300)[None] % 90
    plain, fixed = phi3(), phi3()
    assert not torch.allclose(logits(plain, ids)[:10], logits(plain, ids[:, :10]), atol=0.1)
    fix_rope(fixed, 300)
    assert torch.allclose(logits(fixed, ids)[:10], logits(fixed, ids[:, :10]), atol=1e-4)


def test_frequencies_of_each_layer_type_are_fixed() -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    config = transformers.Gemma3TextConfig(
        **SIZES, head_dim=16, max_position_embeddings=64, sliding_window=16,
        layer_types=["full_attention", "sliding_attention"],
        rope_parameters={"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}},
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Gemma3ForCausalLM(config).eval()
    ids = torch.arange(200)[None] % 90
    whole = logits(model, ids)
    assert not torch.allclose(logits(model, ids[:, :20]), whole[:20], atol=0.01)
    assert fix_rope(model, 200) == ("dynamic",)
    assert torch.allclose(logits(model, ids[:, :20]), whole[:20], atol=1e-4)
    assert model.model.rotary_emb.rope_type == {
        "full_attention": "fixed",
        "sliding_attention": "default",
    }


def test_other_kinds_stay_and_meta_is_refused() -> None:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    assert fix_rope(model, 300) == ()
    with torch.device("meta"), pytest.raises(ValueError, match="meta device"):
        fix_rope(phi3(), 300)
