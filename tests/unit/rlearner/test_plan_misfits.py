"""``rlearner plan`` where nothing fits: what lacks, and changes that were tried."""

from __future__ import annotations

from dataclasses import replace

import pytest

from broker.errors import UserError
from rlearner.plan.candidates import Workload
from rlearner.plan.facts import GIB, Machine
from rlearner.plan.plans import make_plans
from tests.kit.plans import MODEL, demands, plans

# nothing depends on them here
IDLE = ("train.deepspeed.stage=2", "train.megatron.tensor_parallel=1")


@pytest.mark.parametrize(
    ("machine", "overrides", "says"),
    [
        (Machine(2, 24 * GIB), [], r"2 GPUs of 24 GiB: even torch on 1 GPU .* GiB too much .* it fits with train.mic"),
        (Machine(2, 8 * GIB), [], r"a server of vllm on 2 GPUs needs .* 1\.7 GiB too much, for one slot"),
        (Machine(4, 80 * GIB), ["train.backend=torch", "train.ranks=3"], r"ranks: 3 .*; 1 with train.backend torch"),
        (Machine(4, 80 * GIB), ["train.backend=ddp", "train.ranks=1"], r"no layout has .*; it fits without train"),
        (Machine(4, 80 * GIB), ["train.backend=./own.py:Mine"], r"backend: '.*' is not allowed; one of torch, ddp, .*"),
        (Machine(4, 80 * GIB), ["rollout.engine=./own.py:Mine"], r"engine: '.*' is not allowed; one of hf, openai, .*"),
        (Machine(4, 80 * GIB), ["rollout.engine_args.tensor_parallel=8"], r"tensor_parallel: 8 .*; a host has 4 GPUs"),
        (Machine(4, 80 * GIB), ["rollout.engine_args.tensor_parallel=64"], r"tensor_parallel: 64 .*; at most 32: big"),
        (Machine(4, 80 * GIB), ["train.megatron.tensor_parallel=16"], r"tensor_parallel: 16 .*; at most 8: big has"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_in_one_line(
    machine: Machine, overrides: list[str], says: str
) -> None:
    with pytest.raises(UserError, match=says) as refused:
        plans(machine, *overrides)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("machine", "overrides"),
    [
        (Machine(2, 40 * GIB), ["train.backend=torch", "train.optimizer_offload=false"]),
        (Machine(2, 48 * GIB), ["rollout.engine_args.gpu_memory_utilization=0.33"]),
        (Machine(1, 24 * GIB), ["model.dtype=float32", "rollout.prefill_tokens=32768"]),
    ],
)
def test_the_suggested_change_fits(machine: Machine, overrides: list[str]) -> None:
    with pytest.raises(UserError) as refused:
        plans(machine, *overrides)
    change = str(refused.value).partition("it fits with ")[2].partition(", or")[0].split()
    assert change[0].partition(".")[0] in ("train", "rollout", "model")
    assert plans(machine, *overrides, *change)


@pytest.mark.parametrize(
    ("machine", "overrides", "says"),
    [
        (Machine(2, 4 * GIB), [], r"part is weights, 7\.5 GiB; no setting alone helps; it fits with --gpu-memory 40,"),
        (Machine(8, 2.5 * GIB), [], r"is weights, 1\.9 GiB; no setting alone helps; it fits with --gpu-memory \d+$"),
        (Machine(2, 80 * GIB), ["train.ranks=2"], r"takes 2 GPUs .train.ranks=2., and .*; it fits with --gpus 3, "),
        (Machine(4, 80 * GIB, 2), ["train.ranks=9"], r"takes 9 GPUs .*; it fits with --gpus 10 --hosts 2, or w"),
        (Machine(2, 80 * GIB), [*IDLE, "train.backend=ddp", "train.ranks=2"], r"hout train.backend and train.ranks"),
        (Machine(1, 80 * GIB), ["train.backend=ddp"], r"at least 2 GPUs \(train.backend=ddp\), .* with --gpus 3, or "),
    ],
)  # fmt: skip
def test_a_machine_that_suffices_is_named(
    machine: Machine, overrides: list[str], says: str
) -> None:
    with pytest.raises(UserError, match=says):
        plans(machine, *overrides)


def test_settings_and_gpus_that_help_together_are_named() -> None:
    with pytest.raises(UserError) as refused:
        plans(Machine(2, 4 * GIB))
    settings = str(refused.value).partition("or with --gpus 16 --hosts 2 ")[2].split()
    assert settings == ["train.micro_batch_tokens=1536", "train.lora.rank=16"]
    assert plans(Machine(16, 4 * GIB, 2), *settings)


def test_what_is_too_large_with_every_setting_is_named() -> None:
    big = replace(MODEL, blocks=(190_000_000_000,) * 36)
    with pytest.raises(UserError) as refused:
        make_plans(
            Workload(big, demands(model=big)),
            Machine(1, 8 * GIB),
            3,
            lambda more: Workload(big, demands(*more)),
        )
    first, _, last = str(refused.value).partition("; no setting helps: with ")
    assert first.endswith("the largest part is weights, 12742.8 GiB")
    assert last.startswith("train.micro_batch_tokens=1536 rollout.prefill_tokens=512 ")
    assert last.endswith("the largest part is weights, 12742.8 GiB")
