"""Presets, documentation and registries name the same algorithms, and every preset is a
configuration that works.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from broker.errors import ConfigError, UserError
from broker.settings.registry import resolve
from broker.settings.runspec import load, validate
from learner.algorithm.advantages import ADVANTAGES
from learner.algorithm.corrections import CORRECTIONS
from learner.algorithm.losses import LOSSES
from learner.algorithm.traits import EstimatorTraits
from learner.algorithm_checks import estimators_with
from learner.config import AlgorithmSection
from rollout.engines.args import HFArgs

ROOT = Path(__file__).parents[3]
PRESETS = sorted(path.stem for path in (ROOT / "configs" / "algorithm").glob("*.yaml"))
DOC = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")


def preset(name: str, *overrides: str) -> AlgorithmSection:
    return AlgorithmSection.model_validate(
        validate(load("configs/quickstart.yaml", [f"algorithm={name}", *overrides]))["algorithm"]
    )


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_valid_and_documented(name: str) -> None:
    assert preset(name)
    assert DOC.count(f"\n| `{name}` | ") == 1


def test_every_name_of_the_registries_has_a_preset() -> None:
    chosen = [preset(name) for name in PRESETS]
    assert {one.adv_estimator for one in chosen} == set(ADVANTAGES)
    assert {one.pg_variant for one in chosen} == set(LOSSES) - {"sft"}
    assert {one.correction for one in chosen} == set(CORRECTIONS)


def test_every_documented_preset_exists() -> None:
    rows = [
        line.split("|")[1].strip(" `")
        for line in DOC.split("## Offline")[0].splitlines()
        if line.startswith("| `")
    ]
    assert sorted(rows) == PRESETS


def test_the_documentation_names_everything_in_the_registries() -> None:
    for name in (*ADVANTAGES, *LOSSES, *CORRECTIONS):
        assert f"`{name}`" in DOC or f": {name}`" in DOC, name


def test_a_preset_takes_the_place_of_the_section_and_later_overrides_change_it() -> None:
    assert preset("ppo", "algorithm=gspo", "algorithm.clip_high=0.5") == AlgorithmSection(
        adv_estimator="grpo",
        pg_variant="gspo",
        clip_low=3e-4,
        clip_high=0.5,
        loss_agg_mode="seq-mean-token-mean",
    )


def test_the_users_own_preset_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "configs" / "algorithm"
    folder.mkdir(parents=True)
    (folder / "gspo.yaml").write_text("clip_low: 0.1\n")
    monkeypatch.chdir(tmp_path)
    assert load("quickstart", ["algorithm=gspo"])["algorithm"] == {"clip_low": 0.1}


@pytest.mark.parametrize("name", ["gsop", "../algorithm/gspo", "no such"])
def test_an_unknown_preset_lists_those_there_are(name: str) -> None:
    with pytest.raises(UserError) as caught:
        load("quickstart", [f"algorithm={name}"])
    assert str(caught.value) == f"algorithm: {name!r} is not allowed; known: {', '.join(PRESETS)}"


def test_what_the_estimators_and_losses_declare() -> None:
    assert {trait.name: estimators_with(trait.name) for trait in fields(EstimatorTraits)} == {
        "whole_batch": [
            "gae",
            "gdpo",
            "gpg",
            "optimal_token_baseline",
            "reinforce++",
            "reinforce++_baseline",
        ],
        "needs_critic": ["gae"],
        "compares_group": [
            "dr_grpo",
            "gdpo",
            "gigpo",
            "gpg",
            "grpo",
            "grpo_passk",
            "maxrl",
            "opo",
            "optimal_token_baseline",
            "reinforce++_baseline",
            "rloo",
        ],
        "counts_episodes": ["dr_grpo", "gigpo", "grpo", "grpo_passk", "maxrl", "opo", "rloo"],
        "compares_steps": ["gigpo"],
        "greedy_baseline": ["remax"],
        "discounts": ["gae", "optimal_token_baseline", "reinforce", "reinforce++"],
        "divides_by_mean": ["maxrl"],
        "needs_energies": ["optimal_token_baseline"],
        "takes_pass_k": ["grpo_passk"],
        "reads_parts": ["gdpo"],
    }
    traits = {name: resolve("losses", name, LOSSES).traits for name in LOSSES}
    assert {name for name, found in traits.items() if found.dual_clip} == {
        "ppo",
        "starpo",
        "starpo_s",
    }
    assert {name for name, found in traits.items() if not found.kl} == {"starpo_s"}
    assert {name for name, found in traits.items() if not found.ratio} == {"reinforce", "sft"}


def test_a_users_estimator_and_loss_are_checked_by_what_they_declare(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from learner.algorithm.traits import EstimatorTraits, LossTraits, declares\n"
        "def free(trajectories, algorithm): return []\n"
        "@declares(EstimatorTraits(needs_critic=True))\n"
        "def with_critic(trajectories, algorithm): return []\n"
        "@declares(LossTraits(kl=False))\n"
        "def without_kl(tokens, algorithm): return tokens.logprobs, {}\n"
    )
    config = load("quickstart", [f"algorithm.adv_estimator={file}:with_critic"])
    with pytest.raises(
        ConfigError,
        match=r"critic\.enabled: False is not allowed; true with .*:with_critic, which needs",
    ):
        validate(config)
    config = load(
        "quickstart", [f"algorithm.pg_variant={file}:without_kl", "algorithm.kl_coef=0.1"]
    )
    with pytest.raises(
        ConfigError,
        match=r"kl_coef: 0\.1 is not allowed; 0 with algorithm\.pg_variant .*:without_kl",
    ):
        validate(config)
    validate(load("quickstart", [f"algorithm.adv_estimator={file}:free"]))


LAKE = {
    "env": "frozenlake",
    "group_size": 4,
    "max_turns": 4,
    "max_context_tokens": 256,
    "sampling": {"max_tokens": 4},
    "deadline_s": 60,
}


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        (
            {"algorithm": {"adv_estimator": "gae"}},
            "algorithm.critic.enabled: False is not allowed; true with algorithm.adv_estimator gae",
        ),
        (
            {"algorithm": {"critic": {"enabled": True}}},
            "algorithm.critic.enabled: True is not allowed; false with",
        ),
        (
            {
                "algorithm": {"adv_estimator": "gigpo"},
                "domains": {"lake": {**LAKE, "max_turns": 1}},
            },
            "domains.lake.max_turns: 1 is not allowed; above 1 with algorithm.adv_estimator gigpo",
        ),
        (
            {
                "algorithm": {"adv_estimator": "gigpo"},
                "domains": {"lake": {**LAKE, "context": "full"}},
            },
            "domains.lake.context: 'full' is not allowed; auto or steps with algorithm.adv_estimator gigpo",
        ),
        (
            {
                "algorithm": {"adv_estimator": "remax"},
                "domains": {"lake": {**LAKE, "context": "steps"}},
            },
            "domains.lake.context: 'steps' is not allowed; full with algorithm.adv_estimator remax; with steps: "
            "dr_grpo, gigpo, grpo, grpo_passk, maxrl, opo, rloo",
        ),
        (
            {
                "algorithm": {"format_penalty": 0.1},
                "domains": {"lake": {**LAKE, "context": "steps"}},
            },
            "domains.lake.context: 'steps' is not allowed; full with algorithm.format_penalty",
        ),
        (
            {
                "algorithm": {"pass_rate": [0.9, 0.95]},
                "domains": {"lake": {**LAKE, "group_size": 8}},
            },
            "algorithm.pass_rate: [0.9, 0.95] is not allowed; bounds with a share of successes between them that a "
            "group of domains.lake, 8 episodes, can have",
        ),
        (
            {
                "algorithm": {"adv_estimator": "remax"},
                "domains": {"lake": {**LAKE, "group_size_redundancy": 2}},
            },
            "domains.lake.group_size_redundancy: 2 is not allowed; 0 with algorithm.adv_estimator remax",
        ),
        (
            {"algorithm": {"batch_adjust": "copy"}},
            "algorithm.batch_adjust: 'copy' is not allowed; null with algorithm.num_minibatches 1",
        ),
        (
            {"algorithm": {"group_filter": "mixd_success"}},
            "algorithm.group_filter: 'mixd_success' is not allowed; did you mean 'mixed_success'?",
        ),
        (
            {"algorithm": {"whiten_advantages": True}, "train": {"streaming": "always"}},
            "train.streaming: 'always' is not allowed; auto or never with algorithm.whiten_advantages",
        ),
        (
            {"algorithm": {"adv_estimator": "reinforce++"}, "train": {"streaming": "always"}},
            "auto or never with algorithm.adv_estimator reinforce++",
        ),
        (
            {"algorithm": {"num_epochs": 2}, "train": {"streaming": "always"}},
            "auto or never with algorithm.num_epochs and num_minibatches",
        ),
        (
            {"algorithm": {"pg_variant": "starpo_s"}, "train": {"streaming": "always"}},
            "auto or never with algorithm.pg_variant starpo_s",
        ),
        (
            {"model": {"dtype": "float16"}},
            "model.dtype: 'float16' is not allowed; float32 or bfloat16",
        ),
        (
            {"algorithm": {"overlong_buffer": 8}},
            "algorithm.overlong_length: None is not allowed; at least algorithm.overlong_buffer",
        ),
        (
            {"algorithm": {"pg_variant": "cispo", "dual_clip": 3.0}},
            "algorithm.dual_clip: 3.0 is not allowed; null with algorithm.pg_variant cispo; it takes effect in ppo, "
            "starpo, starpo_s",
        ),
        (
            {"algorithm": {"pg_variant": "starpo_s", "kl_coef": 0.1}},
            "algorithm.kl_coef: 0.1 is not allowed; 0 with algorithm.pg_variant starpo_s, which has no KL term",
        ),
        (
            {"algorithm": {"correction": "tis", "mis_mask_level": "token"}},
            "algorithm.mis_mask_level: 'token' is not allowed; null with algorithm.correction tis; only mis reads it",
        ),
        (
            {"algorithm": {"kl_target": 0.1}},
            "algorithm.kl_target: 0.1 is not allowed; null, or algorithm.kl_coef above 0",
        ),
        (
            {"algorithm": {"correction": "tis", "correction_high": 0.9}},
            "algorithm.correction_high: 0.9 is not allowed; at least 1",
        ),
        (
            {"algorithm": {"correction": "icepop", "correction_low": 1.1}},
            "algorithm.correction_low: 1.1 is not allowed; at most 1",
        ),
        (
            {"algorithm": {"gdpo_weights": {"env": 1.0}}},
            "algorithm.gdpo_weights: {'env': 1.0} is not allowed; null with algorithm.adv_estimator grpo; only gdpo",
        ),
        (
            {"algorithm": {"adv_estimator": "gdpo", "gdpo_weights": {}}},
            "algorithm.gdpo_weights: {} is not allowed; null, or a weight other than 0 for some reward",
        ),
        (
            {"algorithm": {"adv_estimator": "gdpo", "gdpo_weights": {"fomat": 1.0}}},
            "algorithm.gdpo_weights.fomat: 1.0 is not allowed; the rewards of this run are env",
        ),
        (
            {"algorithm": {"adv_estimator": "gdpo", "format_penalty": 0.1}},
            "algorithm.format_penalty: 0.1 is not allowed; the default with algorithm.adv_estimator gdpo",
        ),
        (
            {"algorithm": {"adv_estimator": "gdpo", "kl_coef": 0.1, "kl_placement": "reward"}},
            "algorithm.kl_placement: 'reward' is not allowed; the default with algorithm.adv_estimator gdpo",
        ),
        (
            {"algorithm": {"adv_estimator": "gdpo"}, "train": {"streaming": "always"}},
            "auto or never with algorithm.adv_estimator gdpo",
        ),
        (
            {"algorithm": {"correction": "tsi"}},
            "algorithm.correction: 'tsi' is not allowed; did you mean 'tis'?",
        ),
        (
            {
                "algorithm": {"adv_estimator": "dr_grpo"},
                "domains": {"lake": {**LAKE, "group_size": 1}},
            },
            "domains.lake.group_size: 1 is not allowed; at least 2 with algorithm.adv_estimator dr_grpo",
        ),
        (
            {
                "algorithm": {"adv_estimator": "reinforce", "pg_variant": "starpo_s"},
                "domains": {"lake": {**LAKE, "group_size": 1}},
            },
            "at least 2 with algorithm.pg_variant starpo_s",
        ),
    ],
)
def test_senseless_combinations_are_refused_in_one_line(
    sections: dict[str, object], says: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        validate({"domains": {"lake": LAKE}, **sections})
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("option", "value", "off"), [("top_p", 0.9, "1"), ("top_k", 20, "0"), ("min_p", 0.1, "0")]
)
def test_filters_need_an_engine_that_returns_the_logprobs_of_what_is_left(
    option: str, value: float, off: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = {**LAKE, "sampling": {"max_tokens": 4, option: value}}
    for engine in ("hf", "vllm", "sglang", "random"):
        assert (
            validate({"domains": {"lake": lake}, "rollout": {"engine": engine}})["rollout"][
                "engine"
            ]
            == engine
        )
    monkeypatch.setattr(HFArgs, "processed_logprobs", False)
    with pytest.raises(ConfigError) as caught:
        validate({"domains": {"lake": lake}})
    assert str(caught.value) == (
        f"domains.lake.sampling.{option}: {value} is not allowed; {off} with rollout.engine hf, "
        "which does not return the logprobs of what is left; these do: random, sglang, vllm"
    )


def test_groups_of_one_are_enough_for_remax() -> None:
    assert validate(
        {"domains": {"lake": {**LAKE, "group_size": 1}}, "algorithm": {"adv_estimator": "remax"}}
    )


@pytest.mark.parametrize(
    ("section", "mode"),
    [
        ({}, "token-mean"),
        ({"pg_variant": "gspo"}, "seq-mean-token-mean"),
        ({"pg_variant": "gspo", "loss_agg_mode": "token-mean"}, "token-mean"),
        ({"pg_variant": "cispo"}, "token-mean"),
        ({"pg_variant": "sapo"}, "seq-mean-token-mean"),
        ({"pg_variant": "gmpo"}, "seq-mean-token-mean"),
    ],
)
def test_gspo_averages_over_sequences_unless_told_otherwise(
    section: dict[str, str], mode: str
) -> None:
    resolved = validate({"domains": {"lake": LAKE}, "algorithm": section})["algorithm"]
    assert resolved["loss_agg_mode"] == mode
    assert AlgorithmSection.model_validate(resolved).loss_agg_mode == mode


@pytest.mark.parametrize("loss", ["ppo", "starpo", "starpo_s"])
def test_dual_clip_goes_with_the_losses_that_read_it(loss: str) -> None:
    assert (
        validate({"domains": {"lake": LAKE}, "algorithm": {"pg_variant": loss, "dual_clip": 3.0}})[
            "algorithm"
        ]["dual_clip"]
        == 3.0
    )
