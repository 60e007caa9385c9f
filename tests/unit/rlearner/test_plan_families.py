"""A plan can be made for every family that the learner trains, in each dtype, with and without
adapters.
"""

from __future__ import annotations

import pytest
from family_models import FAMILIES, family_config
from transformers import LagunaConfig

from learner.config import LoraSection
from rlearner.plan.model_reader import read_folder
from rlearner_text.config import ModelSection


@pytest.mark.parametrize("name", FAMILIES)
def test_activations_of_every_family_are_traced(tmp_path, name):
    family_config(name).save_pretrained(tmp_path)
    kept = {}
    for dtype in ("float32", "bfloat16"):
        whole = read_folder(tmp_path, name, ModelSection(dtype=dtype))
        adapted = read_folder(tmp_path, name, ModelSection(dtype=dtype), LoraSection())
        assert whole.heads == adapted.heads == 4
        assert (adapted.activations.kept > 0) == bool(adapted.linears)
        kept[dtype] = whole.activations.kept
    assert 1 < kept["float32"] / kept["bfloat16"] <= 2.2  # some are float32 in either


@pytest.mark.parametrize(
    ("name", "share"), [("qwen3_moe", 0.5), ("deepseek_v3", 0.25), ("llama4", 0.25)]
)
def test_experts_that_a_token_does_not_visit_are_not_active(tmp_path, name, share):
    family_config(name).save_pretrained(tmp_path)
    facts = read_folder(tmp_path, name, ModelSection())
    total = sum(facts.blocks) + facts.embedding + facts.outside
    config = family_config(name)
    width = getattr(config, "moe_intermediate_size", config.intermediate_size)
    layers = config.num_hidden_layers - getattr(config, "first_k_dense_replace", 0)
    number = getattr(config, "num_local_experts", None) or getattr(config, "n_routed_experts", None)
    assert total - facts.active == 3 * config.hidden_size * width * number * layers * (1 - share)


def test_heads_that_all_layers_can_divide(tmp_path):
    config = LagunaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_attention_heads_per_layer=[6, 4],
        num_key_value_heads=2,
        head_dim=8,
        mlp_layer_types=["dense", "dense"],
    )
    config.architectures = ["LagunaForCausalLM"]
    config.save_pretrained(tmp_path)
    facts = read_folder(tmp_path, "laguna", ModelSection())
    assert (facts.heads, facts.kv_heads) == (2, 2)
