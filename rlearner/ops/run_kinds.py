"""What a folder of runs holds: training with a fleet, training from data, or an evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, Literal, Protocol, cast

from broker.contract.wire import PlainSettings
from broker.settings.config import Section
from broker.settings.run_settings import stored_value
from learner.offline.config import (
    SECTIONS,
    DataSection,
    DistillSection,
    DpoSection,
    RewardModelSection,
    pipeline_of,
)

RunKind = Literal["training", "evaluation", "sft", "dpo", "distill", "rm"]

# Only `rlearner eval` writes it.
RESULT: Final = "result.json"
# Of offline training, as far as a list of runs shows them.
OFFLINE_SECTIONS: Final[dict[str, type[Section]]] = {
    "data": DataSection,
    "dpo": DpoSection,
    "distill": DistillSection,
    "rm": RewardModelSection,
}


class FolderOfRun(Protocol):
    """A run's folder and the contents of its config.yaml."""

    @property
    def folder(self) -> Path: ...

    @property
    def config(self) -> PlainSettings: ...


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
            fields = ("adv_estimator", "pg_variant", "correction")
            parts = [stored_value(run.config, "algorithm", field) for field in fields]
        case "distill":
            parts = [kind, f"{offline_value(run, kind, 'kl') or 'forward'} KL"]
        case "dpo":
            parts = [kind, offline_value(run, kind, "loss")]
        case "sft" | "rm":
            parts = [kind]
    names = [str(part) for part in dict.fromkeys(parts) if part not in (None, "none")]
    return " with ".join(names)


def offline_value(run: FolderOfRun, section: str, field: str) -> Any:
    """Return one value of offline training's settings, None if it cannot be read."""
    return stored_value(run.config, section, field, OFFLINE_SECTIONS)
