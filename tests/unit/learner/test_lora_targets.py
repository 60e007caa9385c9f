"""Which weights get adapters: stacked experts do, towers, routers and what peft cannot adapt do
not.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import transformers
from part_models import _SIZES, SETTINGS, WITH_VISION

from broker.errors import ConfigError
from broker.weights.adapter import adapted, name_pattern
from learner.backends.models.lora import LoraAdapters
from learner.backends.models.lora_targets import describe_share, find_targets
from learner.config import LoraSection

pytest.importorskip("peft", reason="LoRA needs the extra rlearner[lora]")

ATTENTION = ["k_proj", "o_proj", "q_proj", "v_proj"]
STACKED = ["experts.down_proj", "experts.gate_up_proj"]
# of layers that peft takes for experts
DENSE = ["down_proj.weight", "gate_proj.weight", "up_proj.weight"]


def model_of(name: str, **more: Any) -> Any:
    settings = (
        WITH_VISION[name] if name in WITH_VISION else {**_SIZES, **SETTINGS.get(name, {}), **more}
    )
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(name, **settings)
        )


@cache
def targets_of(name: str) -> Any:
    return find_targets(model_of(name), LoraSection())


@pytest.mark.parametrize("name", ["qwen3_moe", "olmoe", "mixtral", "gpt_oss", "phimoe"])
def test_stacked_experts_are_adapted(name: str) -> None:
    assert targets_of(name).modules == ATTENTION
    assert targets_of(name).parameters == STACKED


@pytest.mark.parametrize("name", ["glm4_moe", "dots1", "ernie4_5_moe"])
def test_dense_layers_named_like_experts_are_adapted(name: str) -> None:
    assert targets_of(name).modules == ATTENTION
    assert targets_of(name).parameters == sorted(DENSE + STACKED)


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3"])
def test_latent_attention(name: str) -> None:
    assert targets_of(name).modules == [
        "kv_a_proj_with_mqa",
        "kv_b_proj",
        "o_proj",
        "q_a_proj",
        "q_b_proj",
    ]
    assert targets_of(name).parameters == sorted(DENSE + STACKED)


def test_routers_are_left_out() -> None:
    for name in SETTINGS:
        every = [*targets_of(name).modules, *targets_of(name).parameters]
        assert not [
            each for each in every if "router" in each or each.rpartition(".")[2] == "gate"
        ], name
    assert "shared_expert_gate" not in targets_of("qwen3_next").modules


def test_layers_that_peft_refuses_are_left_out() -> None:
    assert "in_proj" in targets_of("falcon_h1").modules
    assert "out_proj" not in targets_of("falcon_h1").modules


def test_towers_are_left_out() -> None:
    model = model_of("gemma3")
    modules = find_targets(model, LoraSection()).modules
    assert not [name for name in modules if "vision" in name or name.startswith("fc")]
    assert "down_proj" in modules
    # the tower has a q_proj, too
    assert "model.language_model.layers.1.self_attn.q_proj" in modules
    LoraAdapters(model, LoraSection(), 0, "base")
    assert not [name for name, _ in model.named_parameters() if "lora" in name and "vision" in name]


@pytest.mark.parametrize(
    ("name", "section", "words"),
    [
        (
            "qwen3_moe",
            {"dropout": 0.1},
            "train.lora.dropout: 0.1 .*without down_proj, gate_up_proj",
        ),
        (
            "qwen3_moe",
            {"target_modules": ["q_prj"]},
            "target_modules.*down_proj, gate_up_proj, k_proj",
        ),
        (
            "llama4_text",
            {"target_modules": ["router"]},
            "router: Llama4Router computes more than a product",
        ),
        (
            "falcon_h1",
            {"target_modules": ["out_proj"]},
            "out_proj: .*incompatible with Mamba-based models",
        ),
        ("qwen3", {"target_modules": ["lm_head"]}, "linear layers that this model has"),
        ("gemma3", {"target_modules": ["fc1"]}, "linear layers that this model has"),
        ("gpt2", {}, "train.lora: .*null: peft can adapt no layer of GPT2LMHeadModel"),
    ],
)
def test_refusals(name: str, section: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        find_targets(model_of(name), LoraSection.model_validate(section))
    assert "\n" not in str(caught.value)


def test_stacked_experts_by_name() -> None:
    targets = find_targets(
        model_of("qwen3_moe"), LoraSection(target_modules=["gate_up_proj", "v_proj"])
    )
    assert (targets.modules, targets.parameters) == (["v_proj"], ["experts.gate_up_proj"])


def test_share() -> None:
    model = model_of("qwen3_moe", tie_word_embeddings=True)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    adapters = LoraAdapters(model, LoraSection(), 0, "base")
    share = sum(sizes[name] for name in adapters.adapted) / sum(sizes.values())
    line = describe_share(sizes, adapters.adapted)
    start = "(experts.down_proj, experts.gate_up_proj, k_proj, o_proj, q_proj, v_proj)"
    assert line.startswith(f"adapters on {share:.1%} of the weights {start}; none on embed_tokens ")
    assert 0.9 < share < 1
    offer = adapters.describe("")
    assert set(adapted(dict(model_of("qwen3_moe").named_parameters()), offer.targets)) == set(
        adapters.adapted
    )
    assert offer.transposed == []
    assert (
        name_pattern("model.layers.11.mlp.experts.3.down_proj")
        == "model.layers.*.mlp.experts.*.down_proj"
    )


def test_share_names_towers() -> None:
    model = model_of("gemma3")
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    adapters = LoraAdapters(model, LoraSection(), 0, "base")
    assert " vision_tower " in describe_share(sizes, adapters.adapted).partition("; none on")[2]


def test_the_plan_counts_the_factors_of_experts(tmp_path: Any) -> None:
    from part_models import save_parts

    from rlearner.plan.demands import lora_parameters
    from rlearner.plan.model_reader import read_folder
    from rlearner_text.config import ModelSection

    path, section = save_parts("qwen3_moe", tmp_path / "model"), LoraSection(rank=4)
    facts = read_folder(tmp_path / "model", path, ModelSection(path=path, dtype="bfloat16"), None)
    model = model_of("qwen3_moe")
    LoraAdapters(model, section, 0, path)
    factors = sum(
        parameter.numel() for name, parameter in model.named_parameters() if ".lora_" in name
    )
    assert lora_parameters(section, facts) == factors
