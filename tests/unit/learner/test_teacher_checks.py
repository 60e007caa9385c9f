"""What a teacher cannot be is refused before anything starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from broker.errors import ConfigError
from broker.settings.runspec import validate
from rlearner_text.config import TinyModel
from rlearner_text.tiny import build_tiny

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_layers": 1,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 16,
    "intermediate_size": 64,
}
LAKE = {
    "env": "frozenlake",
    "group_size": 4,
    "max_context_tokens": 256,
    "sampling": {"max_tokens": 4},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    same = build_tiny(folder / "same", TinyModel(**SIZES), seed=2)
    other = Path(build_tiny(folder / "other", TinyModel(**SIZES), seed=2))
    vocabulary = json.loads((other / "tokenizer.json").read_text())
    vocab = vocabulary["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (other / "tokenizer.json").write_text(json.dumps(vocabulary))
    return {"same": str(same), "other": str(other)}


def sections(models: dict[str, str], **changes: Any) -> dict[str, Any]:
    teacher = {"model_path": "same"} | changes.pop("teacher", {})
    if teacher.get("model_path") in models:
        teacher["model_path"] = models[teacher["model_path"]]
    whole: dict[str, Any] = {
        "model": {"path": models["same"]},
        "rollout": {"max_context_tokens": 256},
        "domains": {"lake": LAKE | {"teacher": "big"} | changes.pop("domain", {})},
        "teachers": {"big": teacher},
    }
    return whole | changes


def test_a_teacher_that_works_is_accepted(models: dict[str, str]) -> None:
    validate(sections(models))
    validate(
        sections(models, teacher={"model_path": None, "policy": "actor", "hint": "{reference}"})
    )
    validate(sections(models, teacher={"model_path": "other", "tokenizer": "aligned"}))
    validate(
        sections(
            models,
            teacher={"top_k": 4},
            algorithm={"distillation": {"use": "loss", "kl": "forward", "reward_coef": 1.0}},
        )
    )


ADVANTAGE = {"distillation": {"use": "advantage"}}
LOSS = {"distillation": {"use": "loss"}}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"teacher": {"model_path": "other"}},
            "a model with the policy's vocabulary (token 'a' is 7 there, 6 here), or",
        ),
        (
            {"domain": {"teacher": "bigger"}},
            "domains.lake.teacher: 'bigger' is not allowed; empty, or a name of section teachers: big",
        ),
        ({"domain": {"teacher": ""}}, "name it as the teacher of a trained domain"),
        (
            {"teacher": {"model_path": None}},
            "teachers.big.model_path: None is not allowed; a folder",
        ),
        (
            {"teacher": {"model_path": None, "policy": "actor"}},
            "teachers.big.hint: '' is not allowed; a text with policy actor",
        ),
        (
            {"teacher": {"policy": "actor", "hint": "x"}},
            "null with policy actor, whose weights come from the learner",
        ),
        (
            {"teacher": {"tokenizer": "aligned", "top_k": 3}},
            "teachers.big.top_k: 3 is not allowed; 0 with tokenizer aligned",
        ),
        (
            {"teacher": {"tokenizer": "aligned"}, "domain": {"max_turns": 3}},
            "teachers.big.tokenizer: 'aligned' is not allowed; same, or samples of one turn in domain",
        ),
        (
            {"teacher": {"engine": "random"}},
            "teachers.big.engine: 'random' is not allowed; an engine that can score a context: hf, ",
        ),
        (
            {"teacher": {"engine_args": {"kv_slot": 3}}},
            "teachers.big.engine_args.kv_slot: 3 is not allowed; unknown key, did you mean "
            "'teachers.big.engine_args.kv_slots'?",
        ),
        (
            {"teacher": {"top_k": 3}, "algorithm": ADVANTAGE},
            "algorithm.distillation.use: 'advantage' is not allowed; loss with top_k 3",
        ),
        (
            {"algorithm": {"distillation": {"use": "loss", "kl": "forward"}}},
            "algorithm.distillation.kl: 'forward' is not allowed; reverse, or teachers.X.top_k",
        ),
        (
            {"algorithm": {"filter_zero_variance": True}},
            "algorithm.filter_zero_variance: True is not allowed; false with",
        ),
        (
            {"algorithm": {"distillation": {"coef": 0.0}}},
            "algorithm.distillation.coef: 0.0 is not allowed; above 0, or",
        ),
        (
            {"teachers": {}, "domains": {"lake": LAKE}, "algorithm": LOSS},
            "algorithm.distillation.use: 'loss' is not allowed; left out without a teacher",
        ),
        (
            {"teachers": {"big": {"model_pat": "x"}}},
            "teachers.big.model_pat: 'x' is not allowed; unknown key, did you mean "
            "'teachers.big.model_path'?",
        ),
        ({"teachers": {"b g": {}}}, "teachers: 'b g' is not allowed; use 1-64 letters"),
    ],
)
def test_what_is_refused(models: dict[str, str], changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        validate(sections(models, **changes))
    assert says in str(refusal.value)
    assert "\n" not in str(refusal.value)
