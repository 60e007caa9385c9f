"""What a folder of runs holds: training with a fleet, training from data, or an evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, Literal, Protocol, cast

from learner.offline.config import SECTIONS, pipeline_of

RunKind = Literal["training", "evaluation", "sft", "dpo", "distill"]

# Only `rlearner eval` writes it.
RESULT: Final = "result.json"


class FolderOfRun(Protocol):
    """A run's folder and the contents of its config.yaml."""

    @property
    def folder(self) -> Path: ...

    @property
    def config(self) -> dict[str, Any]: ...


def run_kind(run: FolderOfRun) -> RunKind:
    """Return what the folder of a run holds."""
    if "domains" not in run.config and "data" in run.config:
        return cast("RunKind", pipeline_of(run.config))
    if (run.folder / RESULT).exists():
        return "evaluation"
    return "training"


def is_offline(kind: RunKind) -> bool:
    """Return whether a run of this kind trains from data, without a fleet."""
    return kind in SECTIONS


def algorithm_name(run: FolderOfRun) -> str:
    """Return estimator, loss and correction of a run, or its pipeline with its variant; empty for
    an evaluation and for settings that cannot be read.
    """
    match kind := run_kind(run):
        case "evaluation":
            parts = []
        case "training":
            algorithm = section_of(run, "algorithm")
            parts = [algorithm.get(key) for key in ("adv_estimator", "pg_variant", "correction")]
        case "distill":
            parts = [kind, f"{section_of(run, kind).get('kl', 'forward')} KL"]
        case _:
            parts = [kind, section_of(run, kind).get("loss")]
    names = [str(part) for part in dict.fromkeys(parts) if part not in (None, "none")]
    return " with ".join(names)


def section_of(run: FolderOfRun, name: str) -> dict[str, Any]:
    """Return a section of a run's settings, empty if it cannot be read."""
    section = run.config.get(name)
    return section if isinstance(section, dict) else {}
