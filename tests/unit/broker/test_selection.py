"""Which carrier a learner and a server use."""

from __future__ import annotations

import pytest

from broker.contract.wire import Carrier
from broker.weights.carriers import CARRIERS
from broker.weights.carriers.selection import (
    accepted_carriers,
    choose_carrier,
    offered_carriers,
)


@pytest.mark.parametrize(
    ("setting", "on_gpu", "server", "chosen"),
    [
        ("auto", True, accepted_carriers(on_gpu=True), "nccl"),  # hf on another GPU
        ("auto", True, accepted_carriers(reads="shared", on_gpu=True), "nccl"),
        # hf on the learner's GPU, or on the CPU next to it
        ("auto", True, accepted_carriers(reads="shared"), "shared"),
        # vllm with four workers
        ("auto", True, accepted_carriers(workers={"nccl": 4}, reads="shared"), "nccl"),
        (
            "auto",
            True,
            accepted_carriers(),
            "gloo",
        ),  # an engine that takes host memory, on another host
        ("auto", False, accepted_carriers(on_gpu=True), "gloo"),  # a learner on a CPU
        ("auto", False, accepted_carriers(reads="shared"), "shared"),
        # as rollout.weights_into asks
        ("auto", False, accepted_carriers(workers={"gloo": 2}, reads="shared"), "gloo"),
        ("ipc", True, accepted_carriers(reads="ipc", on_gpu=True), "ipc"),
        (
            "ipc",
            True,
            accepted_carriers(on_gpu=True),
            "gloo",
        ),  # the GPU's memory cannot be opened there
        ("shared", True, accepted_carriers(on_gpu=True), "gloo"),
        ("curve", False, accepted_carriers(reads="shared"), "curve"),
        ("nccl", True, accepted_carriers(), None),
    ],
)
def test_a_pair_uses_the_servers_best_that_is_offered(
    setting: str, on_gpu: bool, server: dict[Carrier, int], chosen: Carrier | None
) -> None:
    assert choose_carrier(offered_carriers(setting, on_gpu=on_gpu), server) == chosen


@pytest.mark.parametrize("on_gpu", [False, True])
def test_auto_never_ends_in_a_refusal(on_gpu: bool) -> None:
    plain = [
        accepted_carriers(reads=reads, on_gpu=here)
        for reads in (None, "ipc", "shared")
        for here in (False, True)
    ]
    failed: list[Carrier] = ["nccl", "ipc", "shared", "gloo", "curve"]
    everything_failed = accepted_carriers(
        workers={"nccl": 2}, reads="ipc", on_gpu=True, failed=failed
    )
    for server in [*plain, everything_failed]:
        assert choose_carrier(offered_carriers("auto", on_gpu=on_gpu), server) is not None


def test_what_failed_is_left_out_while_something_else_remains() -> None:
    assert list(accepted_carriers(reads="shared", on_gpu=True)) == [
        "nccl",
        "shared",
        "gloo",
        "curve",
    ]
    assert list(accepted_carriers(reads="shared", on_gpu=True, failed=["nccl"])) == [
        "shared",
        "gloo",
        "curve",
    ]
    assert list(accepted_carriers(failed=["gloo", "curve"])) == ["gloo", "curve"]


def test_every_setting_offers_what_its_name_says() -> None:
    assert all(offered_carriers(name, on_gpu=True)[0] == name for name in CARRIERS)
