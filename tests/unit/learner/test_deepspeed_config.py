"""train.deepspeed: what is refused before anything starts."""

from typing import Any

import pytest

from broker.errors import ConfigError
from broker.settings.runspec import validate
from learner.backends import SUPPORTED_OPTIONS
from learner.offline import config as offline

LAKE = {
    "env": "frozenlake",
    "group_size": 4,
    "max_context_tokens": 256,
    "sampling": {"max_tokens": 4},
    "deadline_s": 60,
}


def refused(train: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        validate({"domains": {"lake": LAKE}, "train": train})
    return str(caught.value)


def test_what_the_stages_take():
    assert refused({"backend": "deepspeed", "deepspeed": {"stage": 4}}).startswith(
        "train.deepspeed.stage: 4 is not allowed; "
    )
    assert "did you mean 'train.deepspeed.stage'?" in refused(
        {"backend": "deepspeed", "deepspeed": {"stages": 1}}
    )
    line = (
        "train.deepspeed.offload_param: True is not allowed; false with train.deepspeed.stage 2: only stage 3 "
        "divides weights"
    )
    assert refused({"backend": "deepspeed", "deepspeed": {"offload_param": True}}) == line
    able = ", ".join(SUPPORTED_OPTIONS["optimizer_offload"])
    line = f"train.optimizer_offload: True is not allowed; unset with train.backend deepspeed; {able} take it"
    assert refused({"backend": "deepspeed", "optimizer_offload": True}) == line
    for option in ({"activation_offload": True}, {"compile": True, "deepspeed": {"stage": 3}}):
        assert validate({"domains": {"lake": LAKE}, "train": {"backend": "deepspeed", **option}})
    ppo = {"adv_estimator": "gae", "critic": {"enabled": True}}
    assert validate(
        {"domains": {"lake": LAKE}, "train": {"backend": "deepspeed"}, "algorithm": ppo}
    )
    checked = validate({"domains": {"lake": LAKE}, "train": {"backend": "deepspeed", "ranks": 2}})
    assert checked["train"]["deepspeed"]["stage"] == 2
    assert (
        validate(
            {"domains": {"lake": LAKE}, "train": {"backend": "deepspeed", "lora": {"rank": 8}}}
        )["train"]["lora"]["rank"]
        == 8
    )


def test_its_keys_belong_to_it_alone(tmp_path):
    line = "train.deepspeed.stage: 3 is not allowed; unset with train.backend fsdp2"
    assert refused({"backend": "fsdp2", "deepspeed": {"stage": 3}}) == line
    with pytest.raises(
        ConfigError, match=r"^train.backend: 'deepspeed' is not allowed; torch, ddp or fsdp2"
    ):
        offline.validate_config(
            "sft",
            {
                "model": {"path": str(tmp_path)},
                "data": {"train": "x.jsonl"},
                "train": {"backend": "deepspeed"},
            },
        )
