"""Turns a plan into keys of the configuration, and GPUs by number. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rlearner.plan.candidates import Plan
from rlearner.plan.demands import Demands
from rlearner.plan.facts import GIB, Machine


def changed_keys(plan: Plan, demands: Demands) -> dict[str, Any]:
    """Return the keys that a plan sets and the configuration does not."""
    learner = plan.learner
    keys = dict[str, Any]()
    keys["train.backend"] = learner.backend
    keys["train.ranks"] = learner.ranks
    keys["train.gradient_checkpointing"] = learner.checkpointing
    if learner.backend == "deepspeed":
        keys["train.deepspeed.stage"] = learner.stage
        keys["train.deepspeed.offload_optimizer"] = learner.offload
    else:
        keys["train.optimizer_offload"] = learner.offload
    if learner.backend == "megatron":
        keys["train.megatron.tensor_parallel"] = learner.tensor
        keys["train.megatron.pipeline_parallel"] = learner.pipeline
    if plan.server_memory is not None and plan.server is not None and demands.serve is not None:
        keys["rollout.max_running"] = plan.server_memory.running
        if demands.serve.engine == "hf":
            cache = next(
                part.size for part in plan.server_memory.memory.parts if part.name == "KV cache"
            )
            limit = float(demands.current["rollout.engine_args.kv_cache_gib"])
            keys["rollout.engine_args.kv_cache_gib"] = max(limit, math.ceil(10 * cache / GIB) / 10)
        else:
            keys["rollout.engine_args.tensor_parallel"] = plan.server.tensor
    for teacher in plan.teachers:
        keys |= teacher.keys()
    return {key: value for key, value in keys.items() if demands.current.get(key) != value}


def gpus_of(plan: Plan, machine: Machine) -> dict[str, str]:
    """Return the GPUs of learner, servers and reward models, counted over all hosts.

    The key of a teacher's server is ``teacher NAME``.
    """
    first = 0 if plan.shared else plan.learner.ranks
    return {
        "learner": gpu_range(0, plan.learner.ranks),
        "servers": gpu_range(first, plan.last_server_gpu(machine)),
        "rewards": gpu_range(machine.gpus - plan.rewards, machine.gpus),
    } | {server.role: gpu_range(server.first, server.last) for server in plan.teachers}


def gpu_range(first: int, last: int) -> str:
    """Return GPUs from ``first`` to before ``last`` as ``--gpus`` takes them."""
    if first >= last:
        return ""
    return str(first) if last - first == 1 else f"{first}-{last - 1}"


def nest_keys(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return dotted keys as sections."""
    sections: dict[str, Any] = {}
    for key, value in keys.items():
        *path, last = key.split(".")
        section = sections
        for name in path:
            section = section.setdefault(name, {})
        section[last] = value
    return sections


def gpus_on(plan: Plan, machine: Machine, host: int) -> dict[str, str]:
    """Return the GPUs of each role on one host, by that host's numbers.

    The key of a teacher's server is ``teacher NAME``.
    """
    last = machine.gpus - plan.rewards
    begin = host * machine.per_host
    end = (host + 1) * machine.per_host
    spans = {
        "learner": (0, plan.learner.ranks),
        "rollout": (plan.learner.ranks, plan.last_server_gpu(machine)),
        "rewardhub": (last, machine.gpus),
    }
    spans |= {server.role: (server.first, server.last) for server in plan.teachers}
    return {
        role: gpu_range(max(first, begin) - begin, min(stop, end) - begin)
        for role, (first, stop) in spans.items()
    }
