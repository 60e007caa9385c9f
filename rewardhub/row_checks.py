"""Checks that the rows of data sets hold what rewards read of them, before anything starts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from broker.errors import UserError
from broker.settings.registry import resolve
from broker.settings.run_settings import RunSettings
from rewardhub.rewards import REWARDS, loading
from rewardhub.rewards.base import InvalidRowError


def check_rows(
    settings: RunSettings, rows: Mapping[str, Iterable[tuple[str, Mapping[str, Any]]]]
) -> None:
    """Check the rows of each domain with each of its rewards that reads them (``check_row``).

    Args:
        rows: by domain, the place and the columns of each row; read once, only where needed.

    Raises:
        UserError: for the first row that a reward cannot use; names reward, row and argument.
    """
    for name, domain in settings.domains.items():
        checks = {}
        for index, reward in enumerate(domain.rewards):
            if reward.name not in REWARDS:
                continue
            check_row = getattr(resolve("rewards", reward.name, REWARDS), "check_row", None)
            if check_row is not None:
                key = f"domains.{name}.rewards.{index}"
                checks[key] = (check_row, loading.check(reward.name, reward.args, key))
        if not checks:
            continue
        for place, row in rows.get(name, ()):
            for key, (check_row, args) in checks.items():
                try:
                    check_row(args, row)
                except InvalidRowError as error:
                    raise UserError(f"{key}: {place}: {error}") from None
