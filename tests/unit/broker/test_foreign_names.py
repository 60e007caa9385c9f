"""Settings of TRL and verl are answered with what they are called here."""

from __future__ import annotations

from typing import Any

import pytest

from broker.errors import ConfigError
from broker.settings.foreign_names import OWN_NAMES
from broker.settings.run_settings import section_types
from broker.settings.runspec import load, validate
from broker.settings.sections import _inner_section, _keys_at


def test_every_own_name_is_a_setting() -> None:
    for own in OWN_NAMES.values():
        section, *keys = own.removeprefix("domains.DOMAIN.").split(".")
        if own.startswith("domains."):
            section, keys = "domains", [section, *keys]
        model: Any = section_types()[section]
        for key in keys:
            assert key in _keys_at(model, []), own
            model = _inner_section(model.model_fields[key].annotation)


@pytest.mark.parametrize(
    ("override", "own"),
    [
        ("train.learning_rate=1e-6", "train.lr"),
        ("learning_rate=1e-6", "train.lr"),
        ("train.num_generations=8", "domains.DOMAIN.group_size"),
        ("domains.lake.num_generations=8", "domains.lake.group_size"),
        ("rollout.n=8", "domains.DOMAIN.group_size"),
        ("actor_rollout_ref.rollout.n=8", "domains.DOMAIN.group_size"),
        ("trainer.total_training_steps=9", "train.steps"),
        ("domains.lake.reward_funcs=[format]", "domains.lake.rewards"),
    ],
)
def test_words_of_trl_and_verl(override: str, own: str) -> None:
    with pytest.raises(ConfigError, match=rf"unknown key, did you mean '{own}'\?$"):
        validate(load("quickstart", [override]), checks=())


def test_a_misspelt_key_is_answered_by_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'train\.steps'\?$"):
        validate(load("quickstart", ["train.stepz=9"]), checks=())
