"""Finds why nothing fits a machine: too few GPUs, an impossible choice, or too large a part."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from rlearner.plan.candidates import Workload, most_ranks, serving_layouts
from rlearner.plan.facts import GIB, Machine, Memory, Part
from rlearner.plan.layouts import learner_layouts, rank_choices, server_layouts
from rlearner.plan.serving_memory import ServerLayout, server_memory, slot_bytes
from rlearner.plan.teacher_servers import fit_teacher
from rlearner.plan.training_memory import learner_memory

_DIVIDED: Final = (
    "train.backend",
    "train.megatron.tensor_parallel",
    "train.megatron.pipeline_parallel",
)


@dataclass(frozen=True)
class Misfit:
    """Why nothing fits.

    Attributes:
        memory: whether memory lacks, so that settings may help.
        gpus: GPUs that are needed at least.
    """

    text: str
    memory: bool = False
    gpus: int = 0


def find_misfit(work: Workload, machine: Machine) -> Misfit:
    """Return why no layout of a run fits."""
    size = f"{_count_gpus(machine.gpus)} of {machine.memory / GIB:g} GiB"
    if work.rewards is not None and work.rewards.total() > machine.available:
        need = work.rewards.total()
        available = machine.available
        lack = f"{_format_lack(need, available)}{_largest_part(work.rewards)}"
        return Misfit(f"the reward models on one GPU need {lack}", memory=True)
    problems = (
        _server_misfit(work, machine),
        _teacher_misfit(work, machine),
        _too_few(work, machine, size),
    )
    for problem in problems:
        if problem is not None:
            return problem
    choices = rank_choices(work.demands, machine, most_ranks(work, machine))
    layouts = [
        layout
        for ranks in choices
        for layout in learner_layouts(work.model, work.demands, machine, ranks)
    ]
    if not layouts:
        settings = ", ".join(f"{key}={value}" for key, value in work.demands.fixed.items())
        return Misfit(f"{size}: no layout has {settings}")
    memory = {layout: learner_memory(work.model, work.demands.train, layout) for layout in layouts}
    least = min(layouts, key=lambda layout: memory[layout].total())
    need = memory[least].total()
    if need <= machine.available:
        return Misfit(f"{size}: no server fits next to a learner of {least.words}", memory=True)
    text = (
        f"{size}: even {least.words} needs {_format_lack(need, machine.available)} for the learner"
    )
    return Misfit(text + _largest_part(memory[least]), memory=True)


def _too_few(work: Workload, machine: Machine, size: str) -> Misfit | None:
    """Return what lacks if learner, servers and reward models cannot have GPUs of their own."""
    fixed = work.demands.fixed
    keys = ["train.ranks"]
    if "train.ranks" not in fixed:
        keys = [key for key in fixed if key in _DIVIDED]
    settings = ", ".join(f"{key}={fixed[key]}" for key in keys)
    ranks = int(fixed.get("train.ranks", _least_ranks(fixed)))
    server = min((layout.tensor for layout in serving_layouts(work, machine)), default=0)
    # On a single GPU learner and server take turns.
    if machine.gpus == 1 == ranks and not work.reward_gpus and not work.teachers:
        return None
    fits = [(teacher.policy, fit_teacher(teacher, machine)) for teacher in work.teachers]
    teachers = {policy: fit[0] for policy, fit in fits if fit is not None}
    needed = ranks + server + sum(teachers.values()) + work.reward_gpus
    if machine.gpus >= needed:
        return None
    least = "" if "train.ranks" in fixed else "at least "
    parts = [f"the learner takes {least}{_count_gpus(ranks)}"]
    if settings:
        parts[0] += f" ({settings})"
    parts += [f"a server {_count_gpus(server)} of its own"] * (server > 0)
    parts += [f"teacher {policy} {_count_gpus(gpus)}" for policy, gpus in teachers.items()]
    parts += ["the reward models 1 GPU"] * work.reward_gpus
    return Misfit(f"{size}: {', and '.join(parts)}", memory=server > 1, gpus=needed)


def _least_ranks(fixed: Mapping[str, Any]) -> int:
    backend = fixed.get("train.backend", "torch")
    if backend == "torch":
        return 1
    # Every other backend divides its work over two ranks at least.
    if backend == "megatron":
        return max(2, math.prod(int(fixed.get(key, 1)) for key in _DIVIDED[1:]))
    return 2


def _server_misfit(work: Workload, machine: Machine) -> Misfit | None:
    """Return what is wrong with every server; None if one fits."""
    model = work.model
    serve = work.demands.serve
    fixed = work.demands.fixed
    if serve is None or serving_layouts(work, machine):
        return None
    layouts = list(server_layouts(model, work.demands, machine))
    if not layouts:
        key = "rollout.engine_args.tensor_parallel"
        return Misfit(
            f"{key}: {fixed.get(key)} is not allowed; a host has {_count_gpus(machine.per_host)}"
        )
    memory = {layout: server_memory(model, serve, layout, machine).memory for layout in layouts}
    least = min(layouts, key=lambda layout: memory[layout].total())
    slot = slot_bytes(model.converted(serve.itemsize), serve.context, least.tensor)
    need = memory[least].total() + slot
    limit = min(machine.available, serve.share * machine.memory or machine.available)
    if need <= limit:
        key = "rollout.engine_args.kv_cache_gib"
        allowed = f"one slot needs {slot / GIB:.2f} GiB"
        return Misfit(f"{key}: {serve.kv_gib} is not allowed; {allowed}", memory=True)
    name = f"a server of {serve.engine} on {_count_gpus(least.tensor)}"
    whole = Memory((*memory[least].parts, Part("one slot", slot, "")), "")
    return Misfit(
        f"{name} needs {_format_lack(need, limit)}, for one slot{_largest_part(whole)}", memory=True
    )


def _teacher_misfit(work: Workload, machine: Machine) -> Misfit | None:
    """Return what is wrong with the first teacher that no server has room for."""
    for teacher in work.teachers:
        if fit_teacher(teacher, machine) is not None:
            continue
        tensor = teacher.sizes[0]
        memory = server_memory(teacher.model, teacher.serve, ServerLayout(tensor), machine).memory
        name = f"a server of teacher {teacher.policy} on {_count_gpus(tensor)}"
        lack = _format_lack(memory.total(), machine.available)
        return Misfit(f"{name} needs {lack}{_largest_part(memory)}", memory=True)
    return None


def _count_gpus(number: int) -> str:
    return f"{number} GPU{'s' * (number != 1)}"


def _largest_part(memory: Memory) -> str:
    part = max((part for part in memory.parts if part.where == "gpu"), key=lambda part: part.size)
    return f"; the largest part is {part.name}, {part.size / GIB:.1f} GiB"


def _format_lack(need: float, limit: float) -> str:
    excess = f"{(need - limit) / GIB:.1f} GiB too much"
    return f"{need / GIB:.1f} GiB of each GPU's {limit / GIB:.1f}, {excess}"
