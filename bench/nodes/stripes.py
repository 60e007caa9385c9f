"""Weights sent in stripes against one sender, see ``bench.stripes``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench import stripes


def measure(folder: Path, runs: int) -> dict[str, Any]:
    """Return the figures."""
    return stripes.measure(max(runs, 3), layers=11)
