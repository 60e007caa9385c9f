"""Turns a plan into keys of the configuration, GPUs by number, and launch lines per host. Pure."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from typing import Any, Final

from rlearner.plan.demands import Demands
from rlearner.plan.facts import GIB, Machine
from rlearner.plan.plans import Plan

TOKENS: Final = {"rollout": "server.token", "rewardhub": "reward.token"}
URL: Final = '"tls://$HOST0:4222"'


def changed_keys(plan: Plan, demands: Demands) -> dict[str, Any]:
    """Return the keys that a plan sets and the configuration does not."""
    learner, keys = plan.learner, dict[str, Any]()
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
            cache = next(part.size for part in plan.server_memory.memory.parts if part.name == "KV cache")
            limit = float(demands.current["rollout.engine_args.kv_cache_gib"])
            keys["rollout.engine_args.kv_cache_gib"] = max(limit, math.ceil(10 * cache / GIB) / 10)
        else:
            keys["rollout.engine_args.tensor_parallel"] = plan.server.tensor
    return {key: value for key, value in keys.items() if demands.current.get(key) != value}


def gpus_of(plan: Plan, machine: Machine) -> dict[str, str]:
    """Return the GPUs of learner, servers and reward models, counted over all hosts."""
    first = 0 if plan.shared else plan.learner.ranks
    last = machine.gpus - plan.rewards
    named = {"learner": (0, plan.learner.ranks), "servers": (first, last), "rewards": (last, machine.gpus)}
    return {name: span(*bounds) for name, bounds in named.items()}


def span(first: int, last: int) -> str:
    """Return GPUs from ``first`` to before ``last`` as ``--gpus`` takes them."""
    return "" if first >= last else str(first) if last - first == 1 else f"{first}-{last - 1}"


def nested(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return dotted keys as sections."""
    found: dict[str, Any] = {}
    for key, value in keys.items():
        *path, last = key.split(".")
        at = found
        for name in path:
            at = at.setdefault(name, {})
        at[last] = value
    return found


def launch_lines(plan: Plan, machine: Machine, host: int, run: str, environments: int) -> list[str]:
    """Return the commands of one host, the learner's last; the others end with it.

    ``$CONFIG`` is the configuration, ``$HOST0`` the address of the first host, needed only where there are several.
    """
    name = f"run.name={shlex.quote(run)}"
    if plan.shared:
        return [f'rlearner up "$CONFIG" {name} --share-gpus']
    several, lines = machine.hosts > 1, list[str]()
    broker = f" --broker {URL}" if several else ""
    join = {role: f" --join {token}" if host else broker for role, token in TOKENS.items()}
    servers = _on_host(plan.learner.ranks, machine.gpus - plan.rewards, machine, host)
    rewards = _on_host(machine.gpus - plan.rewards, machine.gpus, machine, host)
    learner = _on_host(0, plan.learner.ranks, machine, host)
    if host == 0:
        lines.append("broker serve" + (' --bind "$HOST0" --port 4222 &' if several else " &"))
        for role, token in TOKENS.items() if several else ():
            lines.append(f"[ -e {token} ] || rlearner invite {role} --run {shlex.quote(run)} --out {token}{broker}")
        lines.append(f"envhub --n {environments}{broker} &")
    if host == 0 and not plan.servers:
        lines.append(f"rollout-server --gpus cpu{broker} &")
    elif servers:
        lines.append(f"rollout-server --gpus {servers}{join['rollout']} &")
    if rewards or (host == 0 and not plan.rewards):
        lines.append(f"rewardhub{f' --gpus {rewards}' if rewards else ''}{join['rewardhub']} &")
    if learner:
        nodes = machine.hosts_of(0, plan.learner.ranks)
        ranks = f' --nnodes {nodes} --node-rank {host} --rendezvous "$HOST0":29400' if nodes > 1 else ""
        lines.append(f'rlearner start "$CONFIG" {name} --gpus {learner}{ranks}{broker}')
    return lines


def _on_host(first: int, last: int, machine: Machine, host: int) -> str:
    begin, end = host * machine.per_host, (host + 1) * machine.per_host
    return span(max(first, begin) - begin, min(last, end) - begin)
