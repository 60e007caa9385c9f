"""--gpus: what it means, what is refused, and that it is set before torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

from broker.errors import UserError
from broker.system import gpus


@pytest.mark.parametrize(
    ("spec", "numbers"),
    [
        ("0", [0]),
        ("4-7", [4, 5, 6, 7]),
        ("0,2", [0, 2]),
        ("2, 0-1", [2, 0, 1]),
        ("3-3", [3]),
        ("10-11", [10, 11]),
    ],
)
def test_lists_and_ranges(spec: str, numbers: list[int]) -> None:
    assert gpus.parse(spec) == numbers


@pytest.mark.parametrize("spec", ["", "a", "1-", "-1", "0,,1", "0;1", "1.5", "cuda:0", "0x1"])
def test_anything_else_is_refused_with_what_is_allowed(spec: str) -> None:
    with pytest.raises(
        UserError, match=r"expected cpu, auto, a list such as 0,2 or a range such as 4-7, got "
    ):
        gpus.parse(spec)


def test_backwards_and_twice() -> None:
    with pytest.raises(UserError, match="7-4 runs backwards"):
        gpus.parse("7-4")
    with pytest.raises(UserError, match="names GPU 2 twice"):
        gpus.parse("0-3,2")


def test_existing_gpus_become_visible_in_order() -> None:
    environ = {"CUDA_VISIBLE_DEVICES": "9"}
    assert gpus.select("6,4", environ, lambda: [0, 4, 5, 6]) == "cuda"
    assert environ == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "6,4"}


def test_a_missing_gpu_is_named_with_those_that_exist() -> None:
    environ: dict[str, str] = {}
    with pytest.raises(
        UserError, match=r"^--gpus 2-5: GPUs 4, 5 not on this machine; it has 0, 1, 2, 3$"
    ):
        gpus.select("2-5", environ, lambda: [0, 1, 2, 3])
    with pytest.raises(
        UserError, match=r"^--gpus 0: GPU 0 not on this machine; it has no NVIDIA GPU$"
    ):
        gpus.select("0", environ, lambda: [])
    assert environ == {}


def test_cpu_hides_all_and_auto_leaves_all() -> None:
    environ = {"CUDA_VISIBLE_DEVICES": "1"}
    assert gpus.select("auto", environ, lambda: [0]) == "auto"
    assert environ == {"CUDA_VISIBLE_DEVICES": "1"}
    assert gpus.select("cpu", environ, lambda: [0]) == "cpu"
    assert environ == {"CUDA_VISIBLE_DEVICES": ""}


def test_nothing_loads_torch_before_the_gpus_are_chosen() -> None:
    code = "import sys, rollout.cli, rollout.engines.random; assert 'torch' not in sys.modules; print('ok')"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.stdout.strip() == "ok", done.stderr
