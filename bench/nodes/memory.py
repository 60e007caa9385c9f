"""What ranks need beyond their shards while they load and save, see ``bench.nodes_memory``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench import nodes_memory


def measure(folder: Path, runs: int) -> dict[str, Any]:
    """Return the figures."""
    return nodes_memory.figures()
