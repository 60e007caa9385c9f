"""What a folder of runs holds: training with a fleet, training from data, or an evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal, cast

from learner.offline.config import SECTIONS, pipeline_of

RunKind = Literal["training", "evaluation", "sft", "dpo", "distill"]

# Only `rlearner eval` writes it.
RESULT: Final = "result.json"


def run_kind(config: Mapping[str, Any], folder: Path) -> RunKind:
    """Return what the folder of these settings holds."""
    if "domains" not in config and "data" in config:
        return cast("RunKind", pipeline_of(config))
    return "evaluation" if (folder / RESULT).exists() else "training"


def is_offline(kind: RunKind) -> bool:
    """Return whether a run of this kind trains from data, without a fleet."""
    return kind in SECTIONS


def algorithm_name(config: Mapping[str, Any], kind: RunKind) -> str:
    """Return estimator, loss and correction of a run, or its pipeline with its variant; empty for
    an evaluation and for settings that cannot be read.
    """
    if kind == "evaluation":
        return ""
    if is_offline(kind):
        section = _section_of(config, kind)
        variants = {"dpo": section.get("loss"), "distill": f"{section.get('kl', 'forward')} KL"}
        variant = variants.get(kind)
        return kind if variant in (None, kind) else f"{kind} with {variant}"
    section = _section_of(config, "algorithm")
    parts = [section.get("adv_estimator"), section.get("pg_variant"), section.get("correction")]
    return " with ".join(str(part) for part in parts if part not in (None, "none"))


def _section_of(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    section = config.get(name)
    return section if isinstance(section, dict) else {}
