"""A run with a model of eight billion parameters, to plan without reading a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from broker.settings.runspec import check_settings, load
from rlearner.plan.candidates import Plan, Workload
from rlearner.plan.demands import Demands, read_demands
from rlearner.plan.facts import GIB, ActivationFacts, Machine, Memory, ModelFacts
from rlearner.plan.plans import make_plans
from rlearner.plan.teacher_servers import TeacherFacts

# eight billion parameters in 36 blocks
MODEL = ModelFacts(
    path="big",
    architecture="Qwen3ForCausalLM",
    itemsize=2,
    blocks=(190_000_000,) * 36,
    embedding=620_000_000,
    outside=620_000_000,
    active=8_080_000_000,
    tied=False,
    vocab=151_936,
    heads=32,
    kv_heads=8,
    kv_bytes=147_456,
    linears=(("q_proj", 4096, 4096),) * 36,
    activations=ActivationFacts(kept=6e6, wide=2e6, outside=33e3, block=140e3, stream=8192),
)
H100 = Machine(8, 80 * GIB)


def demands(*overrides: str, model: ModelFacts = MODEL) -> Demands:
    given = load("configs/gsm8k.yaml", ["rollout.engine=vllm", "model.dtype=bfloat16", *overrides])
    return read_demands(given, check_settings(given, checks=()), model)


def workload(
    *overrides: str, rewards: Memory | None = None, teachers: tuple[TeacherFacts, ...] = ()
) -> Workload:
    dtype = next(
        (one.partition("=")[2] for one in reversed(overrides) if one.startswith("model.dtype=")),
        "bfloat16",
    )
    model = replace(MODEL, itemsize=4 if dtype == "float32" else 2)
    return Workload(model, demands(*overrides, model=model), rewards, teachers)


def plans(
    machine: Machine = H100,
    *overrides: str,
    rewards: Memory | None = None,
    teachers: tuple[TeacherFacts, ...] = (),
) -> list[Plan]:
    def reread(more: Sequence[str]) -> Workload:
        return workload(*overrides, *more, rewards=rewards, teachers=teachers)

    return make_plans(reread(()), machine, 20, reread)
