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


def launches(plan: Plan, machine: Machine, host: int, environments: int) -> list[Launch]:
    """Return the processes of one host, the learner last.

    Args:
        environments: at once, in the environment hub.
    """
    found = list[Launch]()
    here = gpus_on(plan, machine, host)
    joins = host > 0
    turns = ("--share-gpus",) if plan.shared else ()
    servers = here["learner"] if plan.shared else here["rollout"]
    if host == 0:
        found += [Launch("broker"), Launch("envhub", ("--n", str(environments)))]
    if host == 0 and not plan.servers:
        found.append(Launch("rollout", ("--gpus", "cpu")))
    elif servers:
        found.append(Launch("rollout", ("--gpus", servers, *turns), joins))
    if here["rewardhub"]:
        found.append(Launch("rewardhub", ("--gpus", here["rewardhub"]), joins))
    elif host == 0 and not plan.rewards:
        found.append(Launch("rewardhub"))
    if here["learner"]:
        nodes = machine.hosts_of(0, plan.learner.ranks)
        found.append(Launch("learner", ("--gpus", here["learner"], *turns), nodes=nodes))
    return found


def joining_roles(plan: Plan, machine: Machine, host: int | None = None) -> list[str]:
    """Return the roles that need join tokens on a host, by default on any host."""
    hosts = range(1, machine.hosts) if host is None else [host] * (host > 0)
    there = [gpus_on(plan, machine, each) for each in hosts]
    return [role for role in JOINING if any(gpus[role] for gpus in there)]
