"""Group filters by name, for dynamic sampling: a group that one does not want is filtered, and another ticket replaces its own.

A filter is a pure function of one scored ``wire.Group``: True keeps it. It must depend on nothing else, for every learner that reads the
log again decides again. Resolved by ``broker.settings.registry.resolve``; a function of the user's comes by dotted path or file path.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

from broker.contract import wire
from broker.errors import UserError
from broker.settings.registry import resolve

FILTERS: Final[dict[str, str]] = {
    "mixed_success": "learner.algorithm.filters.mixed_success:wanted",
}


def is_wanted(name: str, group: wire.Group) -> bool:
    """Whether a filter keeps a group; without a name all are kept.

    Raises:
        UserError: it raised, or returned no boolean. Nothing was consumed: with the filter mended the run goes on.
    """
    if not name:
        return True
    judge = _filter(name)
    try:
        wanted = judge(group)
    except Exception as error:  # someone else's code
        raise UserError(
            f"algorithm.group_filter: {name} raised {type(error).__name__} for the group of ticket {group.ticket}: {error}"
        ) from error
    if not isinstance(wanted, bool):
        raise UserError(
            f"algorithm.group_filter: {name} returned {wanted!r} for the group of ticket {group.ticket}; True keeps it, False filters it"
        )
    return wanted


@cache
def _filter(name: str) -> Any:
    return resolve("filters", name, FILTERS)
