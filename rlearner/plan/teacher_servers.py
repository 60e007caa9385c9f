"""Servers of teachers: which there are, and on which GPUs one of each fits. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from rlearner.plan.facts import Machine, ModelFacts, ServeFacts
from rlearner.plan.serving_memory import ServerLayout, ServerMemory, server_memory

# GPUs of one server that are tried, the fewest first.
SIZES: Final = (1, 2, 4, 8)


@dataclass(frozen=True)
class TeacherFacts:
    """A teacher with weights of its own.

    Attributes:
        name: in ``teachers``.
        policy: what its servers are started with.
        engine_args: of its servers.
    """

    name: str
    policy: str
    model: ModelFacts
    serve: ServeFacts
    engine_args: Mapping[str, Any] = field(default_factory=dict)

    @property
    def sizes(self) -> tuple[int, ...]:
        """GPUs that a server may have: what the configuration sets, or else the fewest first."""
        if self.serve.engine == "hf":
            return SIZES[:1]  # it has no tensor parallelism
        tensor = self.engine_args.get("tensor_parallel")
        return SIZES if tensor is None else (tensor,)


@dataclass(frozen=True)
class TeacherServer:
    """One server of a teacher, on GPUs from ``first`` to before ``last`` of all hosts."""

    teacher: TeacherFacts
    first: int
    last: int
    memory: ServerMemory

    @property
    def role(self) -> str:
        """Its key among the GPUs of a plan."""
        return f"teacher {self.teacher.policy}"

    def keys(self) -> dict[str, Any]:
        """Return what the configuration needs, so that it has this many GPUs."""
        if self.teacher.serve.engine == "hf":
            return {}
        arguments = {**self.teacher.engine_args, "tensor_parallel": self.last - self.first}
        place = f"teachers.{self.teacher.name}.engine_args"
        return {f"{place}.{name}": value for name, value in arguments.items()}


def fit_teacher(teacher: TeacherFacts, machine: Machine) -> tuple[int, ServerMemory] | None:
    """Return the fewest GPUs that a server of a teacher fits on, and its memory; None if none."""
    for tensor in teacher.sizes:
        if tensor > machine.per_host or teacher.model.heads % tensor:
            continue
        memory = server_memory(teacher.model, teacher.serve, ServerLayout(tensor), machine)
        if memory.running:
            return tensor, memory
    return None


def place_teachers(
    teachers: Sequence[TeacherFacts], machine: Machine, last: int
) -> list[TeacherServer] | None:
    """Return one server of each teacher, the first one on the last GPUs, none across hosts.

    Args:
        last: GPUs from this on are taken.

    Returns:
        None if they do not fit.
    """
    servers = []
    for teacher in teachers:
        fit = fit_teacher(teacher, machine)
        if fit is None:
            return None
        tensor, memory = fit
        begin_of_host = (last - 1) // machine.per_host * machine.per_host
        if last - tensor < begin_of_host:
            last = begin_of_host
        if last - tensor < 0:
            return None
        servers.append(TeacherServer(teacher, last - tensor, last, memory))
        last -= tensor
    return servers
