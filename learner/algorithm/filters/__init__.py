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
from learner.algorithm.episodes import episodes

FILTERS: Final[dict[str, str]] = {"mixed_success": "learner.algorithm.filters.mixed_success:wanted"}


def passes_filter(name: str, group: wire.Group) -> bool:
    """Return whether a filter keeps a group; without a name all are kept.

    Raises:
        UserError: if it raised, or did not return a bool. Nothing was consumed: fix it to resume
            the run.
    """
    if not name:
        return True
    judge = _filter(name)
    where = f"for the group of ticket {group.ticket}"
    try:
        wanted = judge(group)
    except Exception as error:  # user code
        problem = f"{name} raised {type(error).__name__} {where}: {error}"
        raise UserError(f"algorithm.group_filter: {problem}") from error
    if not isinstance(wanted, bool):
        problem = f"{name} returned {wanted!r} {where}; True keeps it, False filters it"
        raise UserError(f"algorithm.group_filter: {problem}")
    return wanted


def passes_pass_rate(bounds: tuple[float, float] | None, group: wire.Group) -> bool:
    """Return whether the share of the group's episodes that succeeded is within bounds, without
    greedy baselines.

    Cui et al., PRIME (arXiv 2502.01456): online prompt filtering.
    """
    if bounds is None:
        return True
    found = [episode.success for episode in episodes(group)]
    return is_within(sum(found), len(found), *bounds)


@cache
def _filter(name: str) -> Any:
    return resolve("filters", name, FILTERS)
