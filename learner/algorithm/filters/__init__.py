"""Registry of group filters, for dynamic sampling: the ticket of a rejected group is replaced.

A filter is a pure function of one scored ``wire.Group``: True keeps it. It must depend on nothing
else, because every learner that reads the log again applies it again. Resolved by
``broker.settings.registry.resolve``; a user's function is given by dotted path or file path.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

from broker.contract import wire
from broker.contract.pass_rate import is_within
from broker.errors import UserError
from broker.settings.registry import resolve
from learner.algorithm.episodes import final_trajectories

FILTERS: Final[dict[str, str]] = {
    "mixed_success": "learner.algorithm.filters.mixed_success:has_mixed_success",
}


def passes_filter(name: str, group: wire.Group) -> bool:
    """Return whether a filter keeps a group; without a name all are kept.

    Raises:
        UserError: if it raised, or did not return a bool. Nothing was consumed: fix it to resume.
    """
    if not name:
        return True
    group_filter = _load_filter(name)
    subject = f"for the group of ticket {group.ticket}"
    try:
        is_kept = group_filter(group)
    # The user's code may raise anything.
    except Exception as error:
        problem = f"{name} raised {type(error).__name__} {subject}: {error}"
        raise UserError(f"algorithm.group_filter: {problem}") from error
    if not isinstance(is_kept, bool):
        problem = f"{name} returned {is_kept!r} {subject}; True keeps it, False filters it"
        raise UserError(f"algorithm.group_filter: {problem}")
    return is_kept


def passes_pass_rate(bounds: tuple[float, float] | None, group: wire.Group) -> bool:
    """Return whether the share of successful episodes is within bounds, without greedy ones.

    Cui et al., PRIME (arXiv 2502.01456): online prompt filtering.
    """
    if bounds is None:
        return True
    successes = [episode.success for episode in final_trajectories(group)]
    return is_within(sum(successes), len(successes), *bounds)


@cache
def _load_filter(name: str) -> Any:
    return resolve("filters", name, FILTERS)
