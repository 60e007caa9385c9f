"""Ranks the layouts of a run that fit a machine by the time of a step. Pure, apart from ``reread``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from broker.errors import UserError
from rlearner.plan.candidates import Plan, Workload, candidates
from rlearner.plan.facts import Machine
from rlearner.plan.misfits import find_misfit
from rlearner.plan.remedies import advice


def make_plans(
    work: Workload, machine: Machine, number: int, reread: Callable[[Sequence[str]], Workload]
) -> list[Plan]:
    """Return the fastest plan of each backend and of each stage of DeepSpeed, the fastest first, at
    most ``number``.

    Args:
        reread: the same run with further settings ``key=value``; raises UserError if they are not
            allowed.

    Raises:
        UserError: if nothing fits; says by how much, and what to change.
    """
    found: dict[tuple[str, int], Plan] = {}
    for plan in candidates(work, machine):
        key = (plan.learner.backend, plan.learner.stage)
        if key not in found or _order(plan) < _order(found[key]):
            found[key] = plan
    if not found:
        misfit = find_misfit(work, machine)
        raise UserError(f"{misfit.text}; {advice(misfit, work, machine, reread)}")
    return sorted(found.values(), key=_order)[:number]


def _order(plan: Plan) -> tuple[float, float, float, float]:
    """Sort by time, then by the fewest GPUs of the learner, the shortest training, the most free
    memory.
    """
    return plan.times.step_s, plan.learner.ranks, plan.times.train_s, plan.learner_memory.total()
