"""The keys of ``task.toml`` that cannot be honoured: each is refused by its name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from envhub.tasks.config import (
    AgentTable,
    ArtifactTable,
    EnvironmentTable,
    TaskTable,
    VerifierTable,
)

# a task names it, and nothing would happen
NO_GPUS: Final = "left out or 0: sandboxes have no accelerators"
ONE_SERVICE: Final = "main: there is one sandbox and no compose file"
Refusal = tuple[str, object, str]  # key, value, what is allowed


def refusals(task: TaskTable, *, network: bool, shared: bool) -> Iterator[Refusal]:
    """Yield what a task demands and does not get.

    Args:
        network: whether the run lets sandboxes use the host's network.
        shared: whether the run lets tests run in what the agent left behind.
    """
    yield from _refuse_environment("environment", task.environment, network=network)
    yield from _refuse_phases("", task.agent, task.verifier, network=network, shared=shared)
    yield from _refuse_artifacts("artifacts", task.artifacts)
    for number, step in enumerate(task.steps or ()):
        place = f"steps.{number}."
        yield from _refuse_phases(place, step.agent, step.verifier, network=network, shared=shared)
        yield from _refuse_artifacts(f"{place}artifacts", step.artifacts)
        if step.agent.network_mode not in (None, task.agent.network_mode):
            key = f"{place}agent.network_mode"
            yield key, step.agent.network_mode, "left out: the steps share a sandbox"
    if task.multi_step_reward_strategy is not None and not task.steps:
        yield (
            "multi_step_reward_strategy",
            task.multi_step_reward_strategy,
            "left out: the task has no steps",
        )


def _refuse_environment(place: str, table: EnvironmentTable, *, network: bool) -> Iterator[Refusal]:
    hosts = table.allowed_hosts
    yield from _refuse_network(place, table.network, hosts, network=network)
    if table.os.lower() != "linux":
        yield f"{place}.os", table.os, "linux"
    if table.gpus:
        yield f"{place}.gpus", table.gpus, NO_GPUS
    if table.gpu_types:
        yield f"{place}.gpu_types", table.gpu_types, NO_GPUS
    if table.tpu is not None:
        yield f"{place}.tpu", table.tpu.type, "left out: sandboxes have no accelerators"
    if table.mcp_servers:
        names = [server.name for server in table.mcp_servers]
        allowed = "left out: tools of an episode are configured in its domain"
        yield f"{place}.mcp_servers", names, allowed
    if table.skills_dir is not None:
        yield f"{place}.skills_dir", table.skills_dir, "left out: no agent is given skills"


def _refuse_phases(
    place: str, agent: AgentTable, verifier: VerifierTable, *, network: bool, shared: bool
) -> Iterator[Refusal]:
    phases: tuple[tuple[str, AgentTable | VerifierTable], ...]
    phases = (("agent", agent), ("verifier", verifier))
    for name, table in phases:
        yield from _refuse_network(
            f"{place}{name}", table.network_mode, table.allowed_hosts, network=network
        )
    if verifier.mode == "shared" and not shared:
        allowed = (
            "separate, or set env_args.verifier to shared: its tests then run in the files "
            "that the policy has left, which can be made to pass"
        )
        yield f"{place}verifier.environment_mode", "shared", allowed
    if verifier.environment is not None:
        key = f"{place}verifier.environment"
        yield from _refuse_environment(key, verifier.environment, network=network)
    for number, hook in enumerate(verifier.collect):
        if hook.service != "main":
            yield f"{place}verifier.collect.{number}.service", hook.service, ONE_SERVICE


def _refuse_network(
    place: str, mode: str | None, hosts: list[str] | None, *, network: bool
) -> Iterator[Refusal]:
    key = f"{place}.network_mode"
    if mode == "public" and not network:
        yield key, mode, "no-network, or set env_args.network to host"
    if mode == "allowlist":
        yield key, mode, "no-network, or public with env_args.network host: names are not filtered"
    elif hosts is not None:
        yield f"{place}.allowed_hosts", hosts, "left out: it needs network_mode allowlist"


def _refuse_artifacts(key: str, entries: list[ArtifactTable]) -> Iterator[Refusal]:
    for number, entry in enumerate(entries):
        if entry.service not in (None, "main"):
            yield f"{key}.{number}.service", entry.service, ONE_SERVICE
