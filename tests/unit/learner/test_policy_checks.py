"""Who plays a domain: what cannot work is refused before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from broker.errors import ConfigError
from broker.settings.config import DomainSection, num_trained_seats
from broker.settings.runspec import check_settings
from learner.credit.capacity import largest_group
from rlearner_text.config import TinyModel
from rlearner_text.tiny import build_tiny

SEATS = {"X": "actor", "O": "actor"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    tiny = TinyModel(
        hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=64
    )
    return str(build_tiny(tmp_path_factory.mktemp("model") / "tiny", tiny, seed=1))


def sections(
    model: str, *, policies: dict[str, Any] | None = None, **domain: Any
) -> dict[str, Any]:
    game = {
        "env": "tic_tac_toe",
        "group_size": 4,
        "max_turns": 5,
        "max_context_tokens": 128,
        "sampling": {"max_tokens": 4},
        "seats": SEATS,
    }
    return {
        "model": {"path": model},
        "rollout": {"max_context_tokens": 128},
        "domains": {"game": game | domain, "lake": game | {"env": "frozenlake", "seats": {}}},
        "policies": policies or {},
    }


def refusal(config: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as error:
        check_settings(config)
    text = str(error.value)
    assert "\n" not in text
    return text


def test_every_kind_of_player_is_accepted(model: str) -> None:
    policies = {
        "past": {"model_path": model, "temperature": 0.5},
        "chance": {"script": "random"},
        "gpt": {"base_url": "http://127.0.0.1:1/v1", "model": "x", "api_key": {"env": "KEY"}},
    }
    seats = {"X": "actor", "O": ["actor", "past", "chance", "gpt"]}
    settings = check_settings(sections(model, policies=policies, seats=seats, rotate_seats=True))
    assert settings.domains["game"].seats == seats
    # a plan of the largest group counts both seats, as both may be the trained policy's
    assert largest_group("game", settings.domains["game"], "grpo").episodes == 8
    assert num_trained_seats(settings.domains["lake"]) == 1


@pytest.mark.parametrize(
    ("changes", "key", "allowed"),
    [
        ({"seats": SEATS | {"O": "ghost"}}, "domains.game.seats.O", "a name of section policies"),
        ({"seats": {"X": "actor"}}, "domains.game.seats", "who plays each seat of environment"),
        ({"seats": SEATS | {"Z": "actor"}}, "domains.game.seats", "X, O"),
        ({"seats": {}}, "domains.game.seats", "X, O"),
        ({"seats": SEATS | {"O": []}}, "domains.game.seats.O", "at least one policy"),
        ({"policy": "ghost"}, "domains.game.policy", "actor, or a name of section policies"),
    ],
)
def test_seats_without_a_player(
    model: str, changes: dict[str, Any], key: str, allowed: str
) -> None:
    text = refusal(sections(model, **changes))
    assert key in text
    assert allowed in text


def test_a_trained_domain_needs_the_trained_policy(model: str) -> None:
    chance = {"chance": {"script": "random"}}
    both = {"X": ["actor", "chance"], "O": ["actor", "chance"]}
    assert "actor alone in one seat" in refusal(sections(model, policies=chance, seats=both))
    config = sections(model, policies=chance, seats={"X": "chance", "O": "chance"})
    assert "actor alone in one seat" in refusal(config)
    config = sections(model, policies=chance)
    config["domains"]["lake"]["policy"] = "chance"
    assert "domains.lake.policy" in refusal(config)
    config["domains"]["lake"]["weight"] = 0
    config["eval"] = {"every_steps": 5}
    assert check_settings(config).domains["lake"].policy == "chance"


@pytest.mark.parametrize(
    ("policy", "problem"),
    [
        ({}, "give one of model_path, base_url, script, not none"),
        ({"script": "random", "model_path": "m"}, "not model_path, script"),
        ({"script": "random", "max_tokens": 3}, "max_tokens belongs to base_url"),
        ({"script": "gamble"}, "gamble"),
        ({"script": "random", "args": {"choice": []}}, "policies.p.args.choice"),
        ({"base_url": "http://127.0.0.1:1/v1"}, "base_url needs model"),
        ({"model_path": "no/such/folder"}, "policies.p.model_path"),
    ],
)
def test_a_policy_that_cannot_play(model: str, policy: dict[str, Any], problem: str) -> None:
    config = sections(model, policies={"p": policy}, seats={"X": "actor", "O": "p"})
    assert problem in refusal(config)


def test_a_policy_that_nothing_names(model: str) -> None:
    text = refusal(sections(model, policies={"past": {"script": "random"}}))
    assert "policies.past" in text
    assert "domains.X.seats" in text


def test_a_domain_that_counts_its_seats() -> None:
    section = DomainSection.model_validate({"env": "x", "seats": {"A": "a", "B": ["actor", "b"]}})
    assert num_trained_seats(section) == 1
