"""Settings that follow from others, and follow their changes when a run is resumed."""

from __future__ import annotations

from typing import Any

import pytest

from broker.errors import ConfigError
from broker.settings.derived import release
from broker.settings.run_settings import RunSettings
from broker.settings.runspec import check_settings, validate

DOMAIN: dict[str, Any] = {
    "env": "frozenlake",
    "max_context_tokens": 64,
    "sampling": {"max_tokens": 4},
    "max_turns": 2,
}


def resolved(**sections: Any) -> RunSettings:
    return check_settings({"domains": {"lake": DOMAIN}, **sections})


def test_weights_travel_in_the_engines_dtype() -> None:
    assert resolved().train.weights_dtype is None
    settings = resolved(rollout={"dtype": "bfloat16"})
    assert settings.train.weights_dtype == "bfloat16"
    explicit = resolved(rollout={"dtype": "bfloat16"}, train={"weights_dtype": "float32"})
    assert explicit.train.weights_dtype == "float32"


def test_a_derived_dtype_follows_a_later_change() -> None:
    settings = release(resolved(rollout={"dtype": "bfloat16"}), {})
    assert settings.train.weights_dtype is None
    config = settings.with_values("rollout", dtype=None).to_plain()
    assert validate(config)["train"]["weights_dtype"] is None
    explicit = resolved(rollout={"dtype": "bfloat16"}, train={"weights_dtype": "float32"})
    assert release(explicit, {}).train.weights_dtype == "float32"


def test_fp8_is_read_in_the_dtype_of_the_model() -> None:
    with pytest.raises(
        ConfigError, match=r"rollout\.dtype: 'bfloat16' is not allowed; null or model"
    ):
        resolved(rollout={"dtype": "bfloat16"}, train={"weights_dtype": "fp8"})
    same = resolved(rollout={"dtype": "float32"}, train={"weights_dtype": "fp8"})
    assert same.train.weights_dtype == "fp8"
