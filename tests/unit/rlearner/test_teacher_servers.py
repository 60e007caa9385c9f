"""GPUs for the servers of teachers in ``rlearner plan``."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from broker.errors import UserError
from rlearner.plan.changes import changed_keys, gpus_of
from rlearner.plan.facts import GIB, Machine, Memory, Part, ServeFacts
from rlearner.plan.reader import WorkloadReader
from rlearner.plan.report import as_json, as_text
from rlearner.plan.scripts import launch_lines
from rlearner.plan.teacher_servers import TeacherFacts, place_teachers
from rlearner_text.config import TinyModel
from rlearner_text.tiny import build_tiny
from tests.kit.plans import H100, MODEL, demands, plans

# Seventeen times the model of the run: 276 GB in bfloat16, so four GPUs of 80 GiB.
LARGE = replace(MODEL, path="large", blocks=(3_800_000_000,) * 36)
SERVE = ServeFacts("vllm", running=32, context=4096, prefill=8192, slots=32, share=0.9)
TEACHER = TeacherFacts("big", "big", LARGE, SERVE)
SIZES = TinyModel(
    hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=64
)


def test_a_teacher_gets_the_fewest_gpus_in_front_of_the_reward_models() -> None:
    rewards = Memory((Part("judge", 2 * GIB, ""),), "scoring")
    plan = plans(H100, rewards=rewards, teachers=(TEACHER,))[0]
    gpus = gpus_of(plan, H100)
    assert (gpus["teacher big"], gpus["rewards"]) == ("3-6", "7")
    assert plan.learner.ranks + plan.servers * (plan.server.tensor if plan.server else 0) <= 3
    lines = launch_lines(plan, H100, 0, 4)
    assert "rollout-server --gpus 3-6 --policy big &" in lines
    assert changed_keys(plan, demands())["teachers.big.engine_args.tensor_parallel"] == 4
    text = as_text([plan], MODEL, demands(), H100)
    assert "  GPU 3-6    teacher big: vllm" in text
    memory = json.loads(as_json([plan], MODEL, demands(), H100))["plans"][0]["memory"]
    assert memory["teacher big"]["gpu"] < 74 * GIB


def test_a_server_of_a_teacher_does_not_cross_hosts() -> None:
    two = Machine(16, 80 * GIB, 2)
    small = TeacherFacts("small", "small", MODEL, SERVE)
    servers = place_teachers((small, TEACHER, replace(TEACHER, name="c", policy="c")), two, 15)
    assert servers is not None
    # GPU 15 is taken. 14: the small one; 10 to 13: the first large one; 8 and 9 are too few.
    assert [(server.first, server.last) for server in servers] == [(14, 15), (10, 14), (4, 8)]
    assert place_teachers((TEACHER,) * 4, two, 15) is None
    joined = plans(two, teachers=(TEACHER,))[0]
    lines = launch_lines(joined, two, 1, 4)
    assert any("--policy big" in line and "--join" in line for line in lines)


def test_what_does_not_fit_is_named() -> None:
    huge = replace(TEACHER, engine_args={"tensor_parallel": 1})
    with pytest.raises(UserError, match=r"a server of teacher big on 1 GPU needs 2.* GiB"):
        plans(H100, teachers=(huge,))
    few = Machine(4, 80 * GIB)
    with pytest.raises(UserError, match="teacher big 4 GPUs"):
        plans(few, teachers=(TEACHER,))


def test_teachers_are_read_from_a_configuration(tmp_path: Path) -> None:
    model = build_tiny(tmp_path / "teacher", SIZES)
    overrides = [
        f"teachers.big.model_path={model}",
        "teachers.big.engine=vllm",
        "teachers.insider={policy: actor, hint: so}",
    ]
    (teacher,) = WorkloadReader("configs/teacher.yaml", overrides).read().teachers
    assert (teacher.policy, teacher.serve.engine) == ("big", "vllm")
    assert teacher.model.heads == SIZES.num_heads
    # Engine hf on one GPU needs nothing to be set.
    (teacher,) = WorkloadReader("configs/teacher.yaml", overrides[:1]).read().teachers
    servers = place_teachers((teacher,), H100, 8)
    assert servers is not None
    assert [server.keys() for server in servers] == [{}]
