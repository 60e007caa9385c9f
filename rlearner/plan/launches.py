"""Which processes each host of a plan starts. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from rlearner.plan.candidates import Plan
from rlearner.plan.changes import gpus_on
from rlearner.plan.facts import Machine

Role = Literal["broker", "envhub", "rollout", "rewardhub", "learner"]
PROGRAMS: Final[dict[str, str]] = {
    "envhub": "envhub",
    "rollout": "rollout-server",
    "rewardhub": "rewardhub",
}
JOINING: Final = ("rollout", "rewardhub")


@dataclass(frozen=True)
class Launch:
    """One process of a host.

    Attributes:
        options: apart from those that say where the broker is.
        joins: whether it needs a join token, because the broker is on another host.
        nodes: number of hosts of the learner.
    """

    role: Role
    options: tuple[str, ...] = ()
    joins: bool = False
    nodes: int = 1

    @property
    def gpus(self) -> str:
        """The GPUs as ``--gpus`` takes them; empty if the process has none."""
        return self.options[1] if self.options[:1] == ("--gpus",) else ""


def host_launches(plan: Plan, machine: Machine, host: int, environments: int) -> list[Launch]:
    """Return the processes of one host, the learner last.

    Args:
        environments: at once, in the environment hub.
    """
    processes = list[Launch]()
    gpus = gpus_on(plan, machine, host)
    joins = host > 0
    turns = ("--share-gpus",) * plan.shared
    servers = gpus["learner"] if plan.shared else gpus["rollout"]
    if host == 0:
        processes += [Launch("broker"), Launch("envhub", ("--n", str(environments)))]
    if host == 0 and not plan.servers:
        processes.append(Launch("rollout", ("--gpus", "cpu")))
    elif servers:
        processes.append(Launch("rollout", ("--gpus", servers, *turns), joins))
    for server in plan.teachers:
        if own := gpus[server.role]:
            options = ("--gpus", own, "--policy", server.teacher.policy)
            processes.append(Launch("rollout", options, joins))
    if gpus["rewardhub"]:
        processes.append(Launch("rewardhub", ("--gpus", gpus["rewardhub"]), joins))
    elif host == 0 and not plan.rewards:
        processes.append(Launch("rewardhub"))
    if gpus["learner"]:
        nodes = machine.hosts_of(0, plan.learner.ranks)
        processes.append(Launch("learner", ("--gpus", gpus["learner"], *turns), nodes=nodes))
    return processes


def joining_roles(plan: Plan, machine: Machine, host: int | None = None) -> list[str]:
    """Return the roles that need join tokens on a host, by default on any host."""
    hosts = range(1, machine.hosts) if host is None else [host] * (host > 0)
    launches = [launch for number in hosts for launch in host_launches(plan, machine, number, 0)]
    return [role for role in JOINING if any(launch.role == role for launch in launches)]
