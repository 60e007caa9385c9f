"""Formats plans as text and as JSON. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rlearner.plan.candidates import Plan
from rlearner.plan.changes import changed_keys, gpus_of
from rlearner.plan.demands import Demands
from rlearner.plan.facts import GIB, Machine, Memory, ModelFacts
from rlearner.plan.throughput import ASSUMPTIONS


def as_text(plans: Sequence[Plan], model: ModelFacts, demands: Demands, machine: Machine) -> str:
    """Return a table for each plan, the assumptions last."""
    lines = [
        f"{model.path}: {model.parameters / 1e6:,.1f} M parameters, {model.itemsize} bytes each"
    ]
    for number, plan in enumerate(plans, 1):
        lines += ["", *_plan_table(number, plan, demands, machine)]
    free = (
        f"GiB are of {machine.available / GIB:.1f} that tensors may fill "
        f"of each GPU's {machine.memory / GIB:g}."
    )
    return "\n".join([*lines, "", free, f"Times are ranked, not promised. Assumed: {ASSUMPTIONS}."])


def _plan_table(number: int, plan: Plan, demands: Demands, machine: Machine) -> list[str]:
    times = plan.times
    gpus = gpus_of(plan, machine)
    if plan.shared:
        bound = "trains and generates in turns"
    elif times.train_s > times.generate_s:
        bound = "bound by training"
    else:
        bound = "bound by generation"
    lines = [f"plan {number}: about {times.step_s:.2g} s a step, {bound}"]
    lines += _memory_rows(f"learner: {plan.learner.words}", gpus["learner"], plan.learner_memory)
    if plan.server is not None and plan.server_memory is not None and demands.serve is not None:
        memory = plan.server_memory
        title = f"{plan.servers} x {demands.serve.engine}"
        if plan.server.tensor > 1:
            title += f", tensor parallel {plan.server.tensor}"
        title += f": {memory.running} of {memory.slots} slots at once"
        lines += _memory_rows(title, gpus["servers"], memory.memory)
    for teacher in plan.teachers:
        title = f"{teacher.role}: {teacher.teacher.serve.engine}"
        lines += _memory_rows(title, gpus[teacher.role], teacher.memory.memory)
    if plan.reward_memory is not None:
        lines += _memory_rows("reward models", gpus["rewards"], plan.reward_memory)
    if keys := changed_keys(plan, demands):
        lines.append("  " + " ".join(f"{key}={json.dumps(value)}" for key, value in keys.items()))
    return lines


def _memory_rows(title: str, gpus: str, memory: Memory) -> list[str]:
    peak = f"most at: {memory.peak}"
    lines = [f"  GPU {gpus:<6} {title}", f"    {_format_size(memory.total())}  each GPU, {peak}"]
    for part in memory.parts:
        name = f"{part.name} (host)" if part.where == "host" else part.name
        lines.append(f"    {_format_size(part.size)}    {name:<24}{part.formula}")
    return lines


def _format_size(number: float) -> str:
    if number >= GIB / 10:
        return f"{number / GIB:7.2f} GiB"
    return f"{number / 2**20:7.2f} MiB"


def as_json(plans: Sequence[Plan], model: ModelFacts, demands: Demands, machine: Machine) -> str:
    """Return one JSON object: ``model``, ``machine``, ``assumptions``, ``plans``; in bytes."""
    report = {
        "model": {"path": model.path, "parameters": model.parameters, "itemsize": model.itemsize},
        "machine": asdict(machine) | {"available": machine.available},
        "assumptions": ASSUMPTIONS,
        "plans": [_plan_to_json(plan, demands, machine) for plan in plans],
    }
    return json.dumps(report, indent=1)


def _plan_to_json(plan: Plan, demands: Demands, machine: Machine) -> dict[str, Any]:
    memory = {"learner": _memory_to_json(plan.learner_memory)}
    servers = {"number": plan.servers, "tensor": plan.server.tensor if plan.server else 0}
    if plan.server_memory is not None:
        memory["servers"] = _memory_to_json(plan.server_memory.memory)
        servers |= {"slots": plan.server_memory.slots, "running": plan.server_memory.running}
    if plan.reward_memory is not None:
        memory["rewards"] = _memory_to_json(plan.reward_memory)
    for teacher in plan.teachers:
        memory[teacher.role] = _memory_to_json(teacher.memory.memory)
    return {
        "step_s": plan.times.step_s,
        "train_s": plan.times.train_s,
        "generate_s": plan.times.generate_s,
        "shared": plan.shared,
        "learner": asdict(plan.learner) | {"copies": plan.learner.copies},
        "servers": servers,
        "gpus": gpus_of(plan, machine),
        "memory": memory,
        "keys": changed_keys(plan, demands),
    }


def _memory_to_json(memory: Memory) -> dict[str, Any]:
    return {"gpu": memory.total(), "host": memory.total("host"), **asdict(memory)}
