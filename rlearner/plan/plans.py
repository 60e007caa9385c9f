"""Ranks the layouts of a run that fit a machine by the time of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from broker.errors import UserError
from rlearner.plan.candidates import Plan, Workload, find_candidates
from rlearner.plan.facts import Machine
from rlearner.plan.misfits import find_misfit
from rlearner.plan.remedies import describe_remedies


def make_plans(
    work: Workload, machine: Machine, number: int, reread: Callable[[Sequence[str]], Workload]
) -> list[Plan]:
    """Return the fastest plan of each backend and DeepSpeed stage, fastest first, up to ``number``.

    Args:
        reread: the same run with further settings ``key=value``; raises UserError if they are not
            allowed.

    Raises:
        UserError: if nothing fits; says by how much, and what to change.
    """
    fastest: dict[tuple[str, int], Plan] = {}
    for plan in find_candidates(work, machine):
        key = (plan.learner.backend, plan.learner.stage)
        if key not in fastest or _sort_key(plan) < _sort_key(fastest[key]):
            fastest[key] = plan
    if not fastest:
        misfit = find_misfit(work, machine)
        raise UserError(f"{misfit.text}; {describe_remedies(misfit, work, machine, reread)}")
    return sorted(fastest.values(), key=_sort_key)[:number]


def _sort_key(plan: Plan) -> tuple[float, float, float, float]:
    """Sort by time, then by the learner's GPUs, its time, and its memory."""
    return plan.times.step_s, plan.learner.ranks, plan.times.train_s, plan.learner_memory.total()
