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
        lines += ["", *_table(number, plan, demands, machine)]
    free = f"GiB are of {machine.available / GIB:.1f} that tensors may fill of each GPU's {machine.memory / GIB:g}."
    return "\n".join([*lines, "", free, f"Times are ranked, not promised. Assumed: {ASSUMPTIONS}."])


def _table(number: int, plan: Plan, demands: Demands, machine: Machine) -> list[str]:
    times = plan.times
    gpus = gpus_of(plan, machine)
    bound = (
        "trains and generates in turns"
        if plan.shared
        else ("bound by training" if times.train_s > times.generate_s else "bound by generation")
    )
    lines = [f"plan {number}: about {times.step_s:.2g} s a step, {bound}"]
    lines += _rows(f"learner: {plan.learner.words}", gpus["learner"], plan.learner_memory)
    if plan.server is not None and plan.server_memory is not None and demands.serve is not None:
        held = plan.server_memory
        tensor = plan.server.tensor
        each = f", tensor parallel {tensor}" if tensor > 1 else ""
        title = f"{plan.servers} x {demands.serve.engine}{each}: {held.running} of {held.slots} slots at once"
        lines += _rows(title, gpus["servers"], held.memory)
    if plan.reward_memory is not None:
        lines += _rows("reward models", gpus["rewards"], plan.reward_memory)
    if keys := changed_keys(plan, demands):
        lines.append("  " + " ".join(f"{key}={json.dumps(value)}" for key, value in keys.items()))
    return lines


def _rows(title: str, gpus: str, memory: Memory) -> list[str]:
    peak = f"most at: {memory.peak}"
    lines = [f"  GPU {gpus:<6} {title}", f"    {_size(memory.total())}  each GPU, {peak}"]
    for part in memory.parts:
        where = " (host)" if part.where == "host" else ""
        lines.append(f"    {_size(part.size)}    {part.name + where:<24}{part.formula}")
    return lines


def _size(number: float) -> str:
    return f"{number / GIB:7.2f} GiB" if number >= GIB / 10 else f"{number / 2**20:7.2f} MiB"


def as_json(plans: Sequence[Plan], model: ModelFacts, demands: Demands, machine: Machine) -> str:
    """Return one JSON object: ``model``, ``machine``, ``assumptions``, ``plans``, sizes in bytes."""
    found = {
        "model": {"path": model.path, "parameters": model.parameters, "itemsize": model.itemsize},
        "machine": asdict(machine) | {"available": machine.available},
        "assumptions": ASSUMPTIONS,
        "plans": [_plain(plan, demands, machine) for plan in plans],
    }
    return json.dumps(found, indent=1)


def _plain(plan: Plan, demands: Demands, machine: Machine) -> dict[str, Any]:
    held = plan.server_memory
    server = plan.server
    memory = {
        "learner": plan.learner_memory,
        "servers": held.memory if held else None,
        "rewards": plan.reward_memory,
    }
    slots = {"slots": held.slots, "running": held.running} if held else {}
    return {
        "step_s": plan.times.step_s,
        "train_s": plan.times.train_s,
        "generate_s": plan.times.generate_s,
        "shared": plan.shared,
        "learner": asdict(plan.learner) | {"copies": plan.learner.copies},
        "servers": {"number": plan.servers, "tensor": server.tensor if server else 0} | slots,
        "gpus": gpus_of(plan, machine),
        "memory": {name: _totals(one) for name, one in memory.items() if one is not None},
        "keys": changed_keys(plan, demands),
    }


def _totals(memory: Memory) -> dict[str, Any]:
    return {"gpu": memory.total(), "host": memory.total("host"), **asdict(memory)}
