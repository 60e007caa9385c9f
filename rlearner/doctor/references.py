"""Checks the rows and references of a run's data, by the code of the roles that read them."""

from __future__ import annotations

from typing import Final

from broker.settings.preflight import PreflightFinding
from broker.settings.registry import resolve
from broker.settings.run_settings import RunSettings

ROWS: Final = "envhub.preflight:references"
READ: Final = "rewardhub.references:reference_findings"
TASK_ROWS: Final = "envhub.preflight:task_rows"
CHECK_ROWS: Final = "rewardhub.row_checks:check_rows"


def reference_findings(settings: RunSettings) -> list[PreflightFinding]:
    """Return findings about references that can only be compared as text, or not at all.

    Raises:
        UserError: if a row lacks what a reward reads of it; names the row and the argument.
    """
    resolve("references", CHECK_ROWS, {})(settings, resolve("references", TASK_ROWS, {})(settings))
    rows = resolve("references", ROWS, {})(settings)
    return list(resolve("references", READ, {})(settings, rows))
