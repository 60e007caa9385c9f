"""What ``rollout.exact`` refuses before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from broker.errors import ConfigError
from broker.settings.run_settings import RunSettings
from rollout.exact_checks import check_exact

DOMAIN = {"env": "frozenlake"}


def settings(**sections: dict[str, Any]) -> RunSettings:
    rollout = {"exact": True} | sections.pop("rollout", {})
    domain = DOMAIN | sections.pop("domain", {})
    return RunSettings.of_config({"domains": {"lake": domain}, "rollout": rollout, **sections})


@pytest.mark.parametrize(
    ("sections", "key", "allowed"),
    [
        ({"rollout": {"engine": "vllm"}}, "rollout.exact", "false with rollout.engine vllm"),
        ({"train": {"backend": "fsdp2"}}, "train.backend", "torch with rollout.exact"),
        ({"train": {"ranks": 2}}, "train.ranks", "1 with rollout.exact"),
        ({"train": {"lora": {"rank": 4}}}, "train.lora", "null with rollout.exact"),
        ({"train": {"compile": True}}, "train.compile", "false with rollout.exact"),
        ({"rollout": {"dtype": "bfloat16"}}, "rollout.dtype", "float32 with rollout.exact"),
        ({"train": {"weights_dtype": "fp8"}}, "train.weights_dtype", "float32 with"),
        ({"rollout": {"num_threads": 2}}, "rollout.num_threads", "0 with rollout.exact"),
        ({"domain": {"sampling": {"top_p": 0.9}}}, "domains.lake.sampling.top_p", "1 with"),
        ({"domain": {"sampling": {"top_k": 5}}}, "domains.lake.sampling.top_k", "0 with"),
    ],
)
def test_what_computes_other_bits_is_refused(
    sections: dict[str, Any], key: str, allowed: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_exact(settings(**sections))
    assert caught.value.key == key
    assert caught.value.allowed.startswith(allowed)
    assert "\n" not in str(caught.value)


def test_what_computes_the_same_bits_passes() -> None:
    check_exact(settings())
    check_exact(settings(train={"weights_dtype": "float32"}, rollout={"dtype": "float32"}))
    check_exact(settings(rollout={"exact": False, "engine": "vllm"}))
    check_exact(settings(rollout={"engine": "random", "policy": "random"}))
