"""``rlearner plan``: arithmetic, choices, refusals, and what it writes."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from broker.settings.runspec import load, validate
from rlearner.cli import main
from rlearner.plan.candidates import Workload
from rlearner.plan.changes import gpu_range, nest_keys
from rlearner.plan.facts import GIB, Machine, Memory, Part, TrainFacts
from rlearner.plan.layouts import count_servers, rank_choices
from rlearner.plan.plans import make_plans
from rlearner.plan.scripts import launch_lines
from rlearner.plan.serving_memory import ServerLayout, server_memory
from rlearner.plan.training_memory import LearnerLayout, learner_memory
from rlearner.plan.write import diff_sections, merge_sections
from tests.kit.plans import H100, MODEL, demands, plans

TRAIN = TrainFacts(slice_tokens=16_384)


def parts(layout: LearnerLayout, train: TrainFacts = TRAIN) -> dict[str, Part]:
    return {part.name: part for part in learner_memory(MODEL, train, layout).parts}


def test_a_whole_rank_holds_eighteen_bytes_per_parameter() -> None:
    held = parts(LearnerLayout("torch"))
    names = ("weights", "master weights", "moments", "summed gradients")
    assert sum(held[name].size for name in names) == 18 * MODEL.parameters
    assert held["moments"].formula == "8,080,000,000 trained parameters x 8 bytes"


@pytest.mark.parametrize(
    ("layout", "weights", "gradients", "moments"),
    [
        (LearnerLayout("ddp", 4), 1, 1, 1),
        (LearnerLayout("fsdp2", 4), 4, 4, 4),
        (LearnerLayout("deepspeed", 4, stage=1), 1, 1, 4),
        (LearnerLayout("deepspeed", 4, stage=2), 1, 4, 4),
        (LearnerLayout("deepspeed", 4, stage=3), 4, 4, 4),
        (LearnerLayout("megatron", 8, tensor=2, pipeline=2), 4, 4, 4),
    ],
)
def test_what_ranks_divide(
    layout: LearnerLayout, weights: int, gradients: int, moments: int
) -> None:
    held, number = parts(layout), MODEL.parameters
    found = [held["weights"].size, held["summed gradients"].size, held["moments"].size]
    assert found == [2 * number / weights, 4 * number / gradients, 8 * number / moments]


def test_options_move_or_remove_parts() -> None:
    plain, offloaded = parts(LearnerLayout("torch")), parts(LearnerLayout("torch", offload=True))
    assert {name for name, part in offloaded.items() if part.where == "host"} == {
        "master weights", "moments", "summed gradients",
    }  # fmt: skip
    assert plain["activations"].size == 16_384 * (6e6 + 33e3 + 8192)
    assert (
        parts(LearnerLayout("torch"), replace(TRAIN, activation_offload=True))["activations"].where
        == "host"
    )
    lora = parts(LearnerLayout("torch"), replace(TRAIN, lora_parameters=1000))
    assert (lora["moments"].size, lora["adapters"].size, "master weights" in lora) == (
        8000,
        4000,
        False,
    )
    staged = parts(LearnerLayout("torch"), replace(TRAIN, staging=77))["weight staging"]
    assert (staged.size, staged.where) == (154, "host")


@pytest.mark.parametrize(
    ("overrides", "on_gpu"),
    [
        ([], False),
        (["rollout.engine=hf"], False),
        (["train.weights_backend=nccl"], True),
        (["train.weights_backend=ipc", "rollout.engine=hf"], True),
    ],
)
def test_where_weights_are_staged(overrides: list[str], on_gpu: bool) -> None:
    facts = demands(*overrides).train
    assert (facts.staging, facts.staging_on_gpu) == (2 * MODEL.parameters, on_gpu)


def test_slots_of_a_server() -> None:
    serve = demands("rollout.max_running=1000", "rollout.max_context_tokens=4096").serve
    assert serve is not None
    held = server_memory(MODEL, serve, ServerLayout(1), H100)
    slot = 4096 * 147_456
    fixed = sum(part.size for part in held.memory.parts if part.name != "KV cache")
    assert held.slots == int((0.9 * 80 * GIB - fixed) // slot) == held.running
    shared = server_memory(MODEL, serve, ServerLayout(4), H100)
    assert shared.memory.parts[0].size == 2 * MODEL.parameters / 4
    assert shared.slots > 4 * held.slots


def test_a_server_that_computes_in_another_dtype() -> None:
    serve = demands("rollout.max_running=1000", "rollout.dtype=float32").serve
    half = demands("rollout.max_running=1000", "rollout.dtype=bfloat16").serve
    assert serve is not None
    assert half is not None
    assert MODEL.itemsize == 2
    wide = server_memory(MODEL, serve, ServerLayout(1), H100)
    narrow = server_memory(MODEL, half, ServerLayout(1), H100)
    assert narrow == server_memory(MODEL, replace(half, itemsize=0), ServerLayout(1), H100)
    assert wide.memory.parts[0].size == 4 * MODEL.parameters
    assert wide.memory.parts[0].size == 2 * narrow.memory.parts[0].size
    assert wide.slots < narrow.slots / 2


def test_plans_are_ranked_and_fit() -> None:
    found = plans()
    assert [one.times.step_s for one in found] == sorted(one.times.step_s for one in found)
    assert len({(one.learner.backend, one.learner.stage) for one in found}) == len(found) >= 5
    for one in found:
        assert one.learner_memory.total() <= H100.available
        assert one.learner.ranks + one.servers * one.server.tensor <= 8  # type: ignore[union-attr]


def test_what_the_configuration_sets_stays() -> None:
    wanted = ["train.backend=fsdp2", "train.ranks=6", "train.gradient_checkpointing=true"]
    (only,) = plans(H100, *wanted, "rollout.engine_args.tensor_parallel=2")
    assert (only.learner.backend, only.learner.ranks, only.learner.checkpointing) == (
        "fsdp2",
        6,
        True,
    )
    assert (only.server, only.servers) == (ServerLayout(2), 1)


def test_one_gpu_is_shared() -> None:
    (only,) = plans(Machine(1, 80 * GIB))
    assert only.shared
    assert only.times.step_s == only.times.train_s + only.times.generate_s
    assert launch_lines(only, Machine(1, 80 * GIB), 0, 4) == [
        'rlearner up "$CONFIG" run.name="$RUN" --share-gpus'
    ]


def test_reward_models_get_the_last_gpu() -> None:
    rewards = Memory((Part("judge", 2 * GIB, ""),), "scoring")
    best = plans(H100, rewards=rewards)[0]
    assert best.rewards == 1
    assert "rewardhub --gpus 7 &" in launch_lines(best, H100, 0, 4)


def test_servers_do_not_cross_hosts() -> None:
    two = Machine(16, 80 * GIB, 2)
    assert count_servers(two, 6, 16, 4) == 2
    assert [count_servers(two, *span, 4) for span in ((0, 16), (9, 11), (5, 5), (15, 9))] == [
        4,
        0,
        0,
        0,
    ]
    assert [two.hosts_of(0, 8), two.hosts_of(0, 9), two.hosts_of(6, 4)] == [1, 2, 2]
    assert [gpu_range(0, 4), gpu_range(7, 8), gpu_range(3, 3)] == ["0-3", "7", ""]


def test_few_numbers_of_ranks_are_tried_on_many_hosts() -> None:
    found = rank_choices(demands(), Machine(4096, 80 * GIB, 512), 4095)
    assert found[:64] == list(range(1, 65))
    assert len(found) <= 130
    assert {ranks % 8 for ranks in found[64:-1]} == {0}
    assert found[-2:] == [4088, 4095]
    assert rank_choices(demands(), Machine(8, 80 * GIB), 7) == [1, 2, 3, 4, 5, 6, 7]
    assert rank_choices(demands("train.ranks=333"), Machine(4096, 80 * GIB, 512), 4095) == [333]


def test_a_division_that_is_no_power_of_two_is_kept() -> None:
    odd = replace(MODEL, heads=12, kv_heads=12)
    asked = demands("rollout.engine_args.tensor_parallel=3", model=odd)
    assert {
        plan.server
        for plan in make_plans(Workload(odd, asked), H100, 20, lambda _: Workload(odd, asked))
    } == {ServerLayout(3)}


def test_launch_lines_of_two_hosts() -> None:
    two = Machine(16, 80 * GIB, 2)
    best = replace(plans(two, "train.backend=fsdp2", "train.ranks=10")[0])
    first, second = (launch_lines(best, two, host, 64) for host in (0, 1))
    broker = '--broker "tls://$HOST0:4222"'
    assert first[-1].endswith(
        f'--gpus 0-7 --nnodes 2 --node-rank 0 --rendezvous "$HOST0":29400 {broker}'
    )
    assert second[:2] == [
        "token rollout",
        'rollout-server --gpus 2-7 --join "$here/$RUN.rollout.token" &',
    ]
    assert second[-1].endswith(
        f'--gpus 0-1 --nnodes 2 --node-rank 1 --rendezvous "$HOST0":29400 {broker}'
    )


def test_sections() -> None:
    assert nest_keys({"a.b.c": 1, "a.d": 2}) == {"a": {"b": {"c": 1}, "d": 2}}
    assert diff_sections({"a": {"b": 1, "c": 2}, "d": 1}, {"a": {"b": 1, "c": 3}}) == {
        "d": None,
        "a": {"c": 3},
    }
    assert merge_sections({"a": {"b": 1}, "c": 1}, {"a": {"d": 2}, "c": 2}) == {
        "a": {"b": 1, "d": 2},
        "c": 2,
    }


def test_the_command_writes_a_configuration_that_inherits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan"
    words = [
        "plan",
        "configs/quickstart.yaml",
        "--gpus",
        "4",
        "--json",
        "--write",
        str(out),
        "train.steps=3",
    ]
    assert main([*words, "train.backend=ddp", "train.ranks=2"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["plans"][0]["learner"]["backend"] == "ddp"
    assert found["plans"][0]["memory"]["learner"]["gpu"] > 0
    written = yaml.safe_load((out / "plan.yaml").read_text())
    assert Path(written["inherit"]).name == "quickstart.yaml"
    assert written["train"] == {"steps": 3, "backend": "ddp", "ranks": 2}
    assert validate(load(str(out / "plan.yaml")))["train"]["groups_per_step"] == 16
    script = out / "host-0.sh"
    assert "rollout-server --gpus 2-3 &" in script.read_text()
    subprocess.run(["sh", "-n", str(script)], check=True)


def test_a_plan_that_cannot_fit_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "configs/quickstart.yaml", "--gpus", "2", "--gpu-memory", "1.2"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert main(["plan", "configs/quickstart.yaml", "--gpus", "8", "--hosts", "3"]) == 2
    assert "--hosts 3: hosts have equally many GPUs" in capsys.readouterr().err
