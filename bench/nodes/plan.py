"""The plan's memory against that of real steps, see ``bench.plan``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench import plan


def measure(folder: Path, runs: int) -> dict[str, Any]:
    """Return the figures."""
    return plan.measure(list(plan.SHAPES))
