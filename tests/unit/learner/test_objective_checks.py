"""Combinations of this year's settings that make no sense are refused in one line."""

from __future__ import annotations

from typing import Any

import pytest

from broker.errors import ConfigError
from broker.settings.runspec import load, validate
from learner.offline import config as offline

LAKE = {
    "env": "frozenlake",
    "group_size": 4,
    "max_turns": 4,
    "max_context_tokens": 256,
    "sampling": {"max_tokens": 4},
    "deadline_s": 60,
}
GEOMETRIC = {"level": "geometric", "high": 2.0}


@pytest.mark.parametrize(
    ("algorithm", "says"),
    [
        (
            {"adv_estimator": "grpo", "discount": "turn"},
            "algorithm.discount: 'turn' is not allowed; token with algorithm.adv_estimator grpo; it "
            "takes effect in gae, optimal_token_baseline, reinforce, reinforce++",
        ),
        (
            {"pass_k": 2},
            "algorithm.pass_k: 2 is not allowed; null with algorithm.adv_estimator grpo; only "
            "grpo_passk reads it",
        ),
        (
            {"adv_estimator": "grpo_passk", "pass_k": 5},
            "algorithm.pass_k: 5 is not allowed; at most domains.lake.group_size, which is 4",
        ),
        (
            {"adv_estimator": "maxrl", "format_penalty": 0.1},
            "algorithm.format_penalty: 0.1 is not allowed; 0.0 with algorithm.adv_estimator maxrl, "
            "which divides by a group's mean reward",
        ),
        (
            {"adv_estimator": "maxrl", "reward_normalization": {"norm_mean_type": "group"}},
            "algorithm.reward_normalization.norm_mean_type: 'group' is not allowed; null with",
        ),
        (
            {"adv_estimator": "maxrl", "kl_coef": 0.1, "kl_placement": "reward"},
            "algorithm.kl_placement: 'reward' is not allowed; loss with algorithm.adv_estimator maxrl",
        ),
        (
            {"correction": "tis", "correction_level": "none"},
            "algorithm.correction_level: 'none' is not allowed; token, sequence or geometric with "
            "algorithm.correction tis",
        ),
        (
            {"correction": "tis", "rejections": [GEOMETRIC]},
            "algorithm.rejections: '1 criteria' is not allowed; [] with algorithm.correction tis; only "
            "composed reads them",
        ),
        (
            {"correction": "composed", "correction_level": "none"},
            "algorithm.correction_level: 'none' is not allowed; token, sequence or geometric without",
        ),
        (
            {"correction": "composed", "correction_high": 0.5},
            "algorithm.correction_high: 0.5 is not allowed; at least 1 with",
        ),
        (
            {"correction": "composed", "rejections": [GEOMETRIC, {"estimator": "k3", "low": 0.1}]},
            "algorithm.rejections.1.low: 0.1 is not allowed; null with estimator k3",
        ),
        (
            {"correction": "composed", "rejections": [{"level": "max"}]},
            "algorithm.rejections.0.level: 'max' is not allowed; token, sequence or geometric with",
        ),
        (
            {"correction": "composed", "rejections": [{"low": 1.5, "high": 2.0}]},
            "algorithm.rejections.0.low: 1.5 is not allowed; at most 1: on-policy the ratio is 1",
        ),
        (
            {"correction": "composed", "rejections": [{"high": 0.9}]},
            "algorithm.rejections.0.high: 0.9 is not allowed; at least 1: on-policy the ratio is 1",
        ),
        (
            {"bypass": True},
            "algorithm.bypass: True is not allowed; false with algorithm.correction none, which takes",
        ),
        (
            {"bypass": True, "correction": "decoupled"},
            "algorithm.bypass: True is not allowed; false with algorithm.correction decoupled, which "
            "needs a proximal policy",
        ),
        (
            {"bypass": True, "correction": "opsm", "prox_logp_method": "interpolate"},
            "algorithm.prox_logp_method: 'interpolate' is not allowed; recompute with algorithm.bypass",
        ),
        (
            {"bypass": True, "correction": "tis"},
            "algorithm.bypass: True is not allowed; false with algorithm.correction tis and pg_variant "
            "ppo, whose own ratio is the weight then",
        ),
        (
            {"kl_estimator": "k3+", "kl_coef": 0.1, "kl_placement": "reward"},
            "algorithm.kl_estimator: 'k3+' is not allowed; k3 with algorithm.kl_placement reward",
        ),
        (
            {"kl_importance": True},
            "algorithm.kl_importance: True is not allowed; false without algorithm.kl_coef above 0",
        ),
        (
            {"kl_importance": True, "kl_coef": 0.1, "kl_estimator": "k2"},
            "algorithm.kl_estimator: 'k2' is not allowed; k1 or k3 with algorithm.kl_importance",
        ),
        ({"cov_share": 0.0}, "algorithm.cov_share: 0.0 is not allowed"),
        ({"kpop_phi": 0.0}, "algorithm.kpop_phi: 0.0 is not allowed"),
        ({"pass_k": 1}, "algorithm.pass_k: 1 is not allowed"),
    ],
)
def test_settings_without_effect_are_refused(algorithm: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate({"domains": {"lake": LAKE}, "algorithm": algorithm})
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        (
            {"train": {"streaming": "always"}, "algorithm": {"pg_variant": "clip_cov"}},
            "auto or never with algorithm.pg_variant clip_cov, which needs all groups of a step",
        ),
        (
            {"train": {"streaming": "always"}, "algorithm": {"adv_estimator": "gpg"}},
            "auto or never with algorithm.adv_estimator gpg",
        ),
        (
            {
                "train": {"streaming": "always"},
                "algorithm": {"adv_estimator": "optimal_token_baseline"},
            },
            "auto or never with algorithm.adv_estimator optimal_token_baseline",
        ),
        (
            {"algorithm": {"echo_coef": 0.1}, "domains": {"lake": {**LAKE, "max_turns": 1}}},
            "algorithm.echo_coef: 0.1 is not allowed; 0 without a domain of several turns and context "
            "full",
        ),
        (
            {"algorithm": {"echo_coef": 0.1}, "domains": {"lake": {**LAKE, "context": "steps"}}},
            "algorithm.echo_coef: 0.1 is not allowed; 0 without a domain of several turns",
        ),
        (
            {"algorithm": {"echo_coef": 0.1}, "train": {"backend": "megatron", "ranks": 2}},
            "algorithm.echo_coef: 0.1 is not allowed; 0 with train.backend megatron",
        ),
        (
            {
                "algorithm": {"adv_estimator": "optimal_token_baseline"},
                "train": {"backend": "megatron", "ranks": 2},
            },
            "algorithm.adv_estimator: 'optimal_token_baseline' is not allowed; another with "
            "train.backend megatron",
        ),
        (
            {
                "algorithm": {"adv_estimator": "gpg"},
                "domains": {"lake": {**LAKE, "context": "steps"}},
            },
            "domains.lake.context: 'steps' is not allowed; full with algorithm.adv_estimator gpg",
        ),
    ],
)
def test_what_other_sections_exclude(sections: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate({"domains": {"lake": LAKE}, **sections})
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "algorithm",
    [
        {"bypass": True, "correction": "tis", "pg_variant": "reinforce"},
        {"bypass": True, "correction": "opsm"},
        {"correction": "composed", "rejections": [GEOMETRIC, {"estimator": "k3", "high": 0.1}]},
        {"adv_estimator": "reinforce", "discount": "turn", "gamma": 0.9},
        {"kl_importance": True, "kl_coef": 0.1, "kl_estimator": "k1"},
    ],
)
def test_sensible_combinations_are_accepted(algorithm: dict[str, Any]) -> None:
    assert validate({"domains": {"lake": LAKE}, "algorithm": algorithm})


def test_rejections_on_the_command_line() -> None:
    config = load(
        "configs/quickstart.yaml",
        [
            "algorithm.correction=composed",
            "algorithm.rejections=[{level: sequence, estimator: k3, high: 0.2}]",
        ],
    )
    (rejection,) = validate(config)["algorithm"]["rejections"]
    assert (rejection["level"], rejection["estimator"], rejection["high"]) == (
        "sequence",
        "k3",
        0.2,
    )


def test_label_smoothing_goes_with_dpo(tmp_path: Any) -> None:
    rows = tmp_path / "pairs.jsonl"
    rows.write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    config = {"data": {"train": str(rows)}, "dpo": {"loss": "ipo", "label_smoothing": 0.1}}
    with pytest.raises(ConfigError) as caught:
        offline.validate_config("dpo", config)
    assert str(caught.value) == (
        "dpo.label_smoothing: 0.1 is not allowed; 0 with dpo.loss ipo; it takes effect in dpo"
    )
    config["dpo"] = {"loss": "dpo", "label_smoothing": 0.1}
    settings = offline.validate_config("dpo", config)
    assert isinstance(settings, offline.DpoSettings)
    assert settings.dpo.label_smoothing == 0.1
    config["dpo"] = {"loss": "dpo", "label_smoothing": 0.5}
    with pytest.raises(ConfigError, match=r"label_smoothing: 0\.5 is not allowed"):
        offline.validate_config("dpo", config)
