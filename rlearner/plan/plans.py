"""Finds the layouts of a run that fit a machine, and ranks them by the time of a step. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from broker.errors import UserError
from rlearner.plan.demands import Demands
from rlearner.plan.facts import Machine, Memory, ModelFacts
from rlearner.plan.layouts import count_servers, learner_layouts, rank_choices, server_layouts
from rlearner.plan.misfits import why_nothing_fits
from rlearner.plan.serving_memory import ServerLayout, ServerMemory, server_memory
from rlearner.plan.throughput import StepTimes, generate_seconds, train_seconds
from rlearner.plan.training_memory import LearnerLayout, learner_memory


@dataclass(frozen=True)
class Plan:
    """One layout of a whole run. The learner has the first GPUs, servers the next, reward models the last.

    Attributes:
        servers: copies of the server's model.
        rewards: GPUs that hold every reward model.
        shared: learner and server take turns on one GPU.
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


def make_plans(
    model: ModelFacts, demands: Demands, rewards: Memory | None, machine: Machine, number: int
) -> list[Plan]:
    """Return the fastest plan of each backend, the fastest first, at most ``number``.

    Args:
        rewards: a process of each reward model, on one GPU; None without any.

    Raises:
        UserError: if nothing fits; says by how much, and what to change.
    """
    found: dict[tuple[str, int], Plan] = {}
    for plan in _candidates(model, demands, rewards, machine):
        key = (plan.learner.backend, plan.learner.stage)
        if key not in found or _order(plan) < _order(found[key]):
            found[key] = plan
    if not found:
        raise UserError(why_nothing_fits(model, demands, rewards, machine))
    return sorted(found.values(), key=_order)[:number]


def _order(plan: Plan) -> tuple[float, float, float, float]:
    """Sort by time, then by the fewest GPUs of the learner, the shortest training, the most free memory."""
    return plan.times.step_s, plan.learner.ranks, plan.times.train_s, plan.learner_memory.total()


def _candidates(model: ModelFacts, demands: Demands, rewards: Memory | None, machine: Machine) -> Iterator[Plan]:
    if rewards is not None and rewards.total() > machine.available:
        return
    reward_gpus = 1 if rewards is not None else 0
    last, shared = machine.gpus - reward_gpus, demands.serve is not None and machine.gpus == 1
    most = last if demands.serve is None or shared else last - 1
    for ranks in rank_choices(demands, machine, most):
        serving = list(_servers(model, demands, machine, 0 if shared else ranks, last))
        for layout in learner_layouts(model, demands, machine, ranks) if serving or demands.serve is None else ():
            memory = learner_memory(model, demands.train, layout)
            if memory.total() > machine.available:
                continue
            train_s = train_seconds(model, demands.train, demands.step, layout, machine.hosts_of(0, ranks))
            if demands.serve is None:
                yield Plan(layout, memory, None, None, 0, reward_gpus, rewards, StepTimes(train_s, 0.0))
            for server, held, servers, generate_s in serving:
                times = StepTimes(train_s, generate_s, shared)
                yield Plan(layout, memory, server, held, servers, reward_gpus, rewards, times, shared)


def _servers(
    model: ModelFacts, demands: Demands, machine: Machine, first: int, last: int
) -> Iterator[tuple[ServerLayout, ServerMemory, int, float]]:
    if demands.serve is None:
        return
    for layout in server_layouts(model, demands, machine):
        servers = count_servers(machine, first, last, layout.tensor)
        held = server_memory(model, demands.serve, layout, machine)
        if servers and held.running:
            took = generate_seconds(model, demands.serve, demands.step, layout, servers, held.running)
            yield layout, held, servers, took
