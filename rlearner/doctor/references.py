"""Checks the reference answers of a run's data, by the code of the roles that read them."""

from __future__ import annotations

from typing import Any, Final

from broker.settings.preflight import PreflightFinding
from broker.settings.registry import resolve

ROWS: Final = "envhub.preflight:references"
READ: Final = "rewardhub.references:reference_findings"


def reference_findings(config: dict[str, Any]) -> list[PreflightFinding]:
    """Return findings about references that can only be compared as text, or not at all; ``config``
    is validated.
    """
    rows = resolve("references", ROWS, {})(config)
    return list(resolve("references", READ, {})(config, rows))
