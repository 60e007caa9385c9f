"""What a configuration cannot mean is refused before anything starts, with the key, the value and
what is allowed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from part_models import save_parts

from broker.errors import ConfigError, UserError
from broker.settings.runspec import load, validate
from learner.checks import check_layers, check_name
from learner.config import LoraSection
from learner.offline.config import backend_train
from learner.offline.config import validate_config as validate_offline
from rlearner_text.config import ModelSection, TinyModel
from rlearner_text.hub import expert_names, layer_names
from rlearner_text.tiny import LAYERS, build_tiny

LAKE = {
    "env": "frozenlake",
    "group_size": 4,
    "max_context_tokens": 256,
    "sampling": {"max_tokens": 4},
    "deadline_s": 60,
}
PLUGINS = """
def loss(tokens): ...
def fine(tokens, algorithm, *, more=1): ...
def keep(group): ...
number = 3
"""


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        (
            {"train": {"device": "banana"}},
            "train.device: 'banana' is not allowed; auto, cpu, cuda, or one GPU as cuda:1",
        ),
        ({"train": {"device": "cuda:x"}}, "train.device: 'cuda:x' is not allowed; auto, "),
        (
            {"trackers": {"args": {"tensorboard": 5}}},
            "trackers.args.tensorboard: 5 is not allowed; input should be an object",
        ),
        (
            {"domains": {"lake": {**LAKE, "sampling": {"max_tokens": 4, "stop": [""]}}}},
            "domains.lake.sampling.stop.0: '' is not allowed; string should have at least 1 character",
        ),
        (
            {"train": {"betas": [0.9, 1.0]}},
            "train.betas.1: 1.0 is not allowed; input should be less than 1",
        ),
        (
            {"eval": {"every_steps": 2, "baseline": "random", "baseline_args": {"choises": ["L"]}}},
            "eval.baseline_args.choises: ['L'] is not allowed; unknown key, did you mean 'eval.baseline_args.choices'?",
        ),
        (
            {"train": {"steps": 2**31}},
            "train.steps: 2147483648 is not allowed; input should be less than or equal to 2147483647",
        ),
        (
            {"train": {"lr": float("inf")}},
            "train.lr: inf is not allowed; input should be a finite number",
        ),
        (
            {"domains": {"lake": {**LAKE, "deadline_s": float("inf")}}},
            "domains.lake.deadline_s: inf is not allowed; input should be",
        ),
        (
            {"run": {"seed": 10**30}},
            "run.seed: 1000000000000000000000000000000 is not allowed; input should be",
        ),
        (
            {"model": {"seed": 2**63}},
            "model.seed: 9223372036854775808 is not allowed; input should be",
        ),
        (
            {"train": {"weights_dtype": "fp8", "lora": {}}},
            "train.weights_dtype: 'fp8' is not allowed; null, float32, bfloat16 or float16 with train.lora.send "
            "adapter: factors ",
        ),
        (
            {"train": {"weights_dtype": "fp8", "backend": "megatron"}},
            "train.weights_dtype: 'fp8' is not allowed; null, float32, bfloat16 or float16 with train.backend "
            "megatron: no rank has the ",
        ),
        (
            {
                "train": {
                    "weights_dtype": "fp8",
                    "backend": "deepspeed",
                    "deepspeed": {"stage": 3},
                    "lora": {"send": "merged"},
                }
            },
            "train.weights_dtype: 'fp8' is not allowed; null, float32, bfloat16 or float16 with train.backend "
            "deepspeed stage 3 and ",
        ),
        (
            {"train": {"lora": {"target_modules": ["banana", "q_proj"]}}},
            "train.lora.target_modules: ['banana'] is not allowed; names of this model's linear layers: down_proj, "
            "gate_proj, k_proj, ",
        ),
        (
            {"domains": {"lake": {**LAKE, "context": "full", "memory": "./mine.py:summary"}}},
            "domains.lake.memory: './mine.py:summary' is not allowed; recent with context full, which shows the whole "
            "conversation",
        ),
        (
            {"domains": {"lake": {**LAKE, "context": "full", "history_length": 7}}},
            "domains.lake.history_length: 7 is not allowed; left out with context full, which shows the whole "
            "conversation",
        ),
        (
            {"domains": {"lake": {**LAKE, "memory": "recnt"}}},
            "domains.lake.memory: 'recnt' is not allowed; did you mean 'recent'?",
        ),
        (
            {"rollout": {"engine": "openai", "engine_args": {"base_url": "http://h/v1"}}},
            "rollout.policy: 'actor' is not allowed; engine openai does not follow the learner's weights; name another",
        ),
        (
            {
                "domains": {
                    "lake": {
                        **LAKE,
                        "rewards": [{"name": "reward_model", "args": {"path": "/nope"}}],
                    }
                }
            },
            "domains.lake.rewards.0.args.path: '/nope' is not allowed; no such folder",
        ),
        (
            {
                "domains": {
                    "lake": {
                        **LAKE,
                        "rewards": [
                            {"name": "reward_model", "args": {"path": "a/b", "device": "x"}}
                        ],
                    }
                }
            },
            "domains.lake.rewards.0.args.device: 'x' is not allowed; auto, cpu, cuda, or one GPU as cuda:1",
        ),
        (
            {
                "domains": {
                    "lake": {**LAKE, "rewards": [{"name": "judge", "args": {"base_url": "foo"}}]}
                }
            },
            "domains.lake.rewards.0.args.base_url: 'foo' is not allowed; expected http://host:port/v1 or https://",
        ),
    ],
)
def test_refused(sections: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate({"domains": {"lake": LAKE}, **sections})
    assert str(caught.value).startswith(says)


@pytest.mark.parametrize(
    ("kind", "name", "says"),
    [
        ("losses", "loss", "(tokens, algorithm), and is loss(tokens)"),
        ("advantages", "loss", "(trajectories, algorithm), and is loss(tokens)"),
        ("corrections", "number", "(facts, algorithm), and is an int"),
        ("filters", "fine", "(group), and is fine(tokens, algorithm, *, more=1)"),
        ("preferences", "keep", "(pairs, beta), and is keep(group)"),
        ("losses", "fine", ""),
        ("filters", "keep", ""),
    ],
)
def test_a_function_of_the_users_own_must_take_what_it_is_given(
    kind: str, name: str, says: str, tmp_path: Path
) -> None:
    file = tmp_path / "plugins.py"
    file.write_text(PLUGINS)
    if not says:
        check_name("key", kind, f"{file}:{name}", {})
        return
    with pytest.raises(ConfigError) as caught:
        check_name("key", kind, f"{file}:{name}", {})
    assert (
        str(caught.value) == f"key: '{file}:{name}' is not allowed; it must be a function of {says}"
    )


def test_the_layers_of_a_model_are_known_without_reading_it(tmp_path: Path) -> None:
    tiny = TinyModel(
        hidden_size=16, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=16, intermediate_size=16
    )
    build_tiny(tmp_path / "model", tiny)
    assert layer_names(tmp_path / "model") == set(LAYERS)
    (tmp_path / "other").mkdir()
    assert layer_names(tmp_path / "other") is None
    assert expert_names(tmp_path / "model") == expert_names(tmp_path / "other") == frozenset()


@pytest.mark.parametrize(
    ("lora", "says"),
    [
        ({}, ""),
        ({"target_modules": ["q_proj", "gate_up_proj"]}, ""),
        ({"target_modules": ["w1"]}, "target_modules: ['w1'] is not allowed; names of this model's linear layers"),
        ({"dropout": 0.1}, "dropout: 0.1 is not allowed; 0, or target_modules without down_proj and gate_up_proj"),
        ({"dropout": 0.1, "target_modules": ["down_proj"]}, "dropout: 0.1 is not allowed; 0, or target_modules "),
        ({"dropout": 0.1, "target_modules": ["v_proj"]}, ""),
    ],
)  # fmt: skip
def test_adapters_of_experts_are_checked_before_the_model_is_loaded(
    lora: dict[str, Any], says: str, tmp_path: Path
) -> None:
    path = save_parts("mixtral", tmp_path / "model")
    section = LoraSection.model_validate(lora)
    if not says:
        check_layers(section, ModelSection(path=str(path)))
        return
    with pytest.raises(ConfigError) as caught:
        check_layers(section, ModelSection(path=str(path)))
    assert str(caught.value).startswith(f"train.lora.{says}")


def test_a_file_for_offline_training_is_none_for_a_run_and_the_other_way_round(
    tmp_path: Path,
) -> None:
    with pytest.raises(
        UserError,
        match=r"^data: with that section it is a configuration for `rlearner sft`, not for a run",
    ):
        validate(load("configs/sft.yaml"))
    with pytest.raises(
        UserError,
        match=r"^domains: with that section it is a configuration for `rlearner up` and `rlearner start`",
    ):
        validate_offline("sft", load("configs/quickstart.yaml"))


def test_a_warmup_that_nobody_set_follows_the_steps(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("{}\n")
    data = f"data.train={tmp_path / 'rows.jsonl'}"
    for steps, warmup in ((200, 10), (100, 5), (6, 1), (2, 1), (1, 0)):
        checked = validate_offline("sft", load("configs/sft.yaml", [f"train.steps={steps}", data]))
        assert checked.train.warmup_steps is None  # so that a run may be given more steps
        assert backend_train(checked.train).warmup_steps == warmup
    for name in ("dpo", "distill", "rm"):
        rest = ["train.steps=3", data, *(["distill.teacher=t"] if name == "distill" else [])]
        validate_offline(name, load(f"configs/{name}.yaml", rest))


def test_a_warmup_that_was_set_is_below_the_steps(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("{}\n")
    asked = ["train.steps=2", "train.warmup_steps=10", f"data.train={tmp_path / 'rows.jsonl'}"]
    with pytest.raises(
        ConfigError,
        match=r"^train\.warmup_steps: 10 is not allowed; below train\.steps, which is 2",
    ):
        validate_offline("sft", load("configs/sft.yaml", asked))
    kept = validate_offline("sft", load("configs/sft.yaml", [*asked, "train.warmup_steps=0"]))
    assert backend_train(kept.train).warmup_steps == 0


def test_defaults_stay_what_they_are() -> None:
    assert ModelSection().seed == 0
    assert (
        validate({"domains": {"lake": {**LAKE, "context": "full"}}})["domains"]["lake"]["memory"]
        == "recent"
    )
