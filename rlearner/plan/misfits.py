"""Says in one line why nothing fits a machine: what lacks how much, and what to change. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from rlearner.plan.demands import Demands
from rlearner.plan.facts import GIB, Machine, Memory, ModelFacts
from rlearner.plan.layouts import learner_layouts, rank_choices, server_layouts
from rlearner.plan.serving_memory import server_memory, slot_bytes
from rlearner.plan.training_memory import LearnerLayout, learner_memory

LORA: Final = 16  # the rank that is suggested


def why_nothing_fits(model: ModelFacts, demands: Demands, rewards: Memory | None, machine: Machine) -> str:
    """Return the line."""
    size = f"{machine.gpus} GPU{'s' if machine.gpus > 1 else ''} of {machine.memory / GIB:g} GiB"
    room = machine.gpus - (1 if rewards is not None else 0)
    if rewards is not None and rewards.total() > machine.available:
        lack = _lack(rewards.total(), machine)
        return f"the reward models do not fit one GPU: together they need {lack}; use smaller ones, or device: cpu"
    if room < (1 if demands.serve is None else 2) and machine.gpus > room:
        return f"{size}: too few for a learner, servers and reward models on GPUs of their own; raise --gpus"
    if problem := _servers(model, demands, machine):
        return problem
    most = room if demands.serve is None or machine.gpus == 1 else room - 1
    choices = rank_choices(demands, machine, most)
    layouts = [layout for ranks in choices for layout in learner_layouts(model, demands, machine, ranks)]
    if not layouts:
        chosen = ", ".join(f"{key}={value}" for key, value in demands.fixed.items())
        return f"{size}: no layout has {chosen}; remove one of these keys, or change --gpus"
    needs = {layout: learner_memory(model, demands.train, layout).total() for layout in layouts}
    least = min(layouts, key=needs.__getitem__)
    if needs[least] <= machine.available:
        return f"{size}: no server fits next to a learner of {least.words}; raise --gpus"
    lack = _lack(needs[least], machine)
    return f"{size}: even {least.words} needs {lack} for the learner; {_remedy(model, demands, layouts, machine)}"


def _servers(model: ModelFacts, demands: Demands, machine: Machine) -> str:
    """Return what is wrong with every server; empty if one fits."""
    if demands.serve is None:
        return ""
    layouts = list(server_layouts(model, demands, machine))
    if not layouts:
        key = "rollout.engine_args.tensor_parallel"
        return f"{key}: {demands.fixed.get(key)} is not allowed; a host has {machine.per_host} GPUs"
    held = {layout: server_memory(model, demands.serve, layout, machine) for layout in layouts}
    if any(one.running for one in held.values()):
        return ""
    least = min(layouts, key=lambda layout: held[layout].memory.total())
    need = held[least].memory.total() + slot_bytes(model, demands.serve.context, least.tensor)
    limit = min(machine.available, demands.serve.share * machine.memory or machine.available)
    name = f"a server of {demands.serve.engine} on {least.tensor} GPU{'s' if least.tensor > 1 else ''}"
    if need <= limit:
        need = slot_bytes(model, demands.serve.context) / GIB
        return f"rollout.engine_args.kv_cache_gib: {demands.serve.kv_gib} is not allowed; one slot needs {need:.2f} GiB"
    lack = f"{need / GIB:.1f} GiB of each GPU's {limit / GIB:.1f}, {(need - limit) / GIB:.1f} GiB too much"
    other = "another engine (rollout.engine=vllm)" if demands.serve.engine == "hf" else "more GPUs for each host"
    return f"{name} needs {lack}, for one slot; lower rollout.prefill_tokens or max_running, or use {other}"


def _remedy(model: ModelFacts, demands: Demands, layouts: Sequence[LearnerLayout], machine: Machine) -> str:
    """Return the first change of keys with which the learner fits; else what to do about the machine."""
    train, narrow, longest = demands.train, replace(model, itemsize=2), demands.longest
    factors = sum(LORA * (inputs + outputs) for _, inputs, outputs in model.linears)
    adapted = replace(train, lora_parameters=factors, reference=False, staging=4 * factors)
    changes = [
        (f"train.micro_batch_tokens={longest}", model, replace(train, slice_tokens=longest)),
        ("model.dtype=bfloat16", narrow, train),
        (f"train.lora.rank={LORA}", model, adapted),
        (f"model.dtype=bfloat16 train.lora.rank={LORA}", narrow, adapted),
        (f"train.micro_batch_tokens={longest} train.lora.rank={LORA}", model, replace(adapted, slice_tokens=longest)),
    ]
    for text, changed, facts in changes:
        if any(learner_memory(changed, facts, layout).total() <= machine.available for layout in layouts):
            return f"it fits with {text}"
    free = f"remove {', '.join(demands.fixed)}, " if demands.fixed else ""
    return f"{free}raise --gpus, or use a smaller model"


def _lack(need: float, machine: Machine) -> str:
    over = (need - machine.available) / GIB
    return f"{need / GIB:.1f} GiB of each GPU's {machine.available / GIB:.1f}, {over:.1f} GiB too much"
