"""Which carrier a learner and a server use."""

from __future__ import annotations

import pytest

from broker.contract.wire import Carrier
from broker.weights.carriers import SETTINGS, choose, offered, takes


@pytest.mark.parametrize(
    ("setting", "on_gpu", "server", "chosen"),
    [
        ("auto", True, takes(on_gpu=True), "nccl"),  # hf on another GPU
        ("auto", True, takes(reads="shared", on_gpu=True), "nccl"),
        # hf on the learner's GPU, or on the CPU next to it
        ("auto", True, takes(reads="shared"), "shared"),
        # vllm with four workers
        ("auto", True, takes(workers={"nccl": 4}, reads="shared"), "nccl"),
        ("auto", True, takes(), "gloo"),  # an engine that takes host memory, on another host
        ("auto", False, takes(on_gpu=True), "gloo"),  # a learner on a CPU
        ("auto", False, takes(reads="shared"), "shared"),
        # as rollout.weights_into asks
        ("auto", False, takes(workers={"gloo": 2}, reads="shared"), "gloo"),
        ("ipc", True, takes(reads="ipc", on_gpu=True), "ipc"),
        ("ipc", True, takes(on_gpu=True), "gloo"),  # the GPU's memory cannot be opened there
        ("shared", True, takes(on_gpu=True), "gloo"),
        ("curve", False, takes(reads="shared"), "curve"),
        ("nccl", True, takes(), None),
    ],
)
def test_a_pair_uses_the_servers_best_that_is_offered(
    setting: str, on_gpu: bool, server: dict[Carrier, int], chosen: Carrier | None
) -> None:
    assert choose(offered(setting, on_gpu=on_gpu), server) == chosen


@pytest.mark.parametrize("on_gpu", [False, True])
def test_auto_never_ends_in_a_refusal(on_gpu: bool) -> None:
    plain = [
        takes(reads=reads, on_gpu=here)
        for reads in (None, "ipc", "shared")
        for here in (False, True)
    ]
    failed: list[Carrier] = ["nccl", "ipc", "shared", "gloo", "curve"]
    everything_failed = takes(workers={"nccl": 2}, reads="ipc", on_gpu=True, failed=failed)
    for server in [*plain, everything_failed]:
        assert choose(offered("auto", on_gpu=on_gpu), server) is not None


def test_what_failed_is_left_out_while_something_else_remains() -> None:
    assert list(takes(reads="shared", on_gpu=True)) == ["nccl", "shared", "gloo", "curve"]
    assert list(takes(reads="shared", on_gpu=True, failed=["nccl"])) == ["shared", "gloo", "curve"]
    assert list(takes(failed=["gloo", "curve"])) == ["gloo", "curve"]


def test_every_setting_offers_what_its_name_says() -> None:
    assert all(name in carriers for name, carriers in SETTINGS.items())
