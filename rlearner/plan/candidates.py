"""Finds every layout of a run that fits a machine. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from rlearner.plan.demands import Demands
from rlearner.plan.facts import Machine, Memory, ModelFacts
from rlearner.plan.layouts import count_servers, learner_layouts, rank_choices, server_layouts
from rlearner.plan.serving_memory import ServerLayout, ServerMemory, server_memory
from rlearner.plan.teacher_servers import TeacherFacts, TeacherServer, place_teachers
from rlearner.plan.throughput import StepTimes, generate_seconds, train_seconds
from rlearner.plan.training_memory import LearnerLayout, learner_memory


@dataclass(frozen=True)
class Workload:
    """What a run computes.

    Attributes:
        rewards: a process of each reward model, on one GPU; None without any.
        teachers: those with weights of their own.
    """

    model: ModelFacts
    demands: Demands
    rewards: Memory | None = None
    teachers: tuple[TeacherFacts, ...] = ()

    @property
    def reward_gpus(self) -> int:
        return int(self.rewards is not None)

    def without(self, *keys: str) -> Workload:
        """Return the same run, whose configuration leaves these choices open, too."""
        fixed = {key: value for key, value in self.demands.fixed.items() if key not in keys}
        return replace(self, demands=replace(self.demands, fixed=fixed))


@dataclass(frozen=True)
class Plan:
    """One layout of a run: the learner has the first GPUs, reward models the last.

    Attributes:
        servers: copies of the server's model.
        rewards: GPUs that hold every reward model.
        shared: learner and server take turns on one GPU.
        teachers: a server of each, before the reward models.
    """

    learner: LearnerLayout
    learner_memory: Memory
    server: ServerLayout | None
    server_memory: ServerMemory | None
    servers: int
    rewards: int
    reward_memory: Memory | None
    times: StepTimes
    shared: bool = False
    teachers: tuple[TeacherServer, ...] = ()

    def last_server_gpu(self, machine: Machine) -> int:
        """Return the GPU from which on there are no servers of the trained policy."""
        return min((server.first for server in self.teachers), default=machine.gpus - self.rewards)


def find_candidates(work: Workload, machine: Machine) -> Iterator[Plan]:
    """Yield every plan that fits."""
    model = work.model
    demands = work.demands
    rewards = work.rewards
    server_memories = serving_layouts(work, machine)
    is_in_turns = is_shared(work, machine)
    teachers = tuple(teacher_servers(work, machine) or ())
    for ranks in _learner_ranks(work, machine):
        servers = _count_places(work, machine, ranks, server_memories)
        if not servers and demands.serve is not None:
            continue
        for layout in learner_layouts(model, demands, machine, ranks):
            memory = learner_memory(model, demands.train, layout)
            if memory.total() > machine.available:
                continue
            train_s = train_seconds(
                model, demands.train, demands.step, layout, machine.hosts_of(0, ranks)
            )
            if demands.serve is None:
                yield Plan(
                    layout,
                    memory,
                    server=None,
                    server_memory=None,
                    servers=0,
                    rewards=work.reward_gpus,
                    reward_memory=rewards,
                    times=StepTimes(train_s, 0.0),
                    teachers=teachers,
                )
            for server, number in servers.items():
                assert demands.serve is not None
                generate_s = generate_seconds(
                    model,
                    demands.serve,
                    demands.step,
                    layout=server,
                    servers=number,
                    running=server_memories[server].running,
                )
                yield Plan(
                    layout,
                    memory,
                    server=server,
                    server_memory=server_memories[server],
                    servers=number,
                    rewards=work.reward_gpus,
                    reward_memory=rewards,
                    times=StepTimes(train_s, generate_s, is_in_turns),
                    shared=is_in_turns,
                    teachers=teachers,
                )


def fits_machine(work: Workload, machine: Machine) -> bool:
    """Return whether there is a plan."""
    server_memories = serving_layouts(work, machine)
    return any(
        learner_memory(work.model, work.demands.train, layout).total() <= machine.available
        for ranks in _learner_ranks(work, machine)
        if work.demands.serve is None or _count_places(work, machine, ranks, server_memories)
        for layout in learner_layouts(work.model, work.demands, machine, ranks)
    )


def is_shared(work: Workload, machine: Machine) -> bool:
    """Return whether learner and server take turns on the only GPU."""
    return work.demands.serve is not None and machine.gpus == 1


def most_ranks(work: Workload, machine: Machine) -> int:
    """Return how many GPUs a learner may have, so that servers and reward models have theirs."""
    has_servers = work.demands.serve is not None and not is_shared(work, machine)
    return last_server_gpu(work, machine) - has_servers


def teacher_servers(work: Workload, machine: Machine) -> list[TeacherServer] | None:
    """Return a server of each teacher, None if they do not fit."""
    return place_teachers(work.teachers, machine, machine.gpus - work.reward_gpus)


def last_server_gpu(work: Workload, machine: Machine) -> int:
    """Return the GPU from which on teachers and reward models have theirs; 0 if none fit."""
    servers = teacher_servers(work, machine)
    if servers is None:
        return 0
    return min((server.first for server in servers), default=machine.gpus - work.reward_gpus)


def serving_layouts(work: Workload, machine: Machine) -> dict[ServerLayout, ServerMemory]:
    """Return the memory of each layout of a server that has room for a sequence."""
    if work.demands.serve is None:
        return {}
    layouts = server_layouts(work.model, work.demands, machine)
    memories = {
        layout: server_memory(work.model, work.demands.serve, layout, machine) for layout in layouts
    }
    return {layout: memory for layout, memory in memories.items() if memory.running}


def _learner_ranks(work: Workload, machine: Machine) -> list[int]:
    if work.rewards is not None and work.rewards.total() > machine.available:
        return []
    return rank_choices(work.demands, machine, most_ranks(work, machine))


def _count_places(
    work: Workload, machine: Machine, ranks: int, layouts: Iterable[ServerLayout]
) -> dict[ServerLayout, int]:
    """Return how many servers have room next to a learner, by layout, if there is room for one."""
    first = 0 if is_shared(work, machine) else ranks
    last = last_server_gpu(work, machine)
    numbers = {layout: count_servers(machine, first, last, layout.tensor) for layout in layouts}
    return {layout: number for layout, number in numbers.items() if number}
