"""The sections ``checkpoint``, ``samples``, ``trackers`` and ``failures``."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)

from broker.settings.config import Section


def _check_keep(value: Any) -> Any:
    """Refuse what is neither a boolean nor a number, in one message for both."""
    if isinstance(value, int) and (isinstance(value, bool) or value > 0):
        return value
    raise ValueError("expected true, false or a number of groups, at least 1")


class CheckpointSection(Section):
    """When checkpoints are taken, and how many are kept."""

    every_steps: NonNegativeInt = 0  # at multiples of this step; 0: never
    # at the first step that ends this long after the last checkpoint; 0: never
    every_minutes: NonNegativeFloat = 10
    # newest checkpoints that are kept
    keep: Annotated[int, Field(ge=2)] = 2
    # write the weights also in Hugging Face format, up to this size; `rlearner export` writes those
    # of larger models
    hf_max_gib: NonNegativeFloat = 8


class SamplesSection(Section):
    """Archive of consumed records, for trace, audit and replay without a broker."""

    # archive the newest groups, by their number, in the run's folder; true: all; false: none
    keep: Annotated[bool | PositiveInt, BeforeValidator(_check_keep)] = 200
    max_file_mib: PositiveFloat = 256.0  # of one file of the archive


class TrackersSection(Section):
    """Destinations of metrics in addition to metrics.jsonl."""

    # names of the registry in learner/reporting/trackers
    use: list[str] = Field(default_factory=lambda: ["tensorboard"])
    # name of the project in the trackers
    project: str = "rlearner"
    args: dict[str, dict[str, Any]] = Field(default_factory=dict)  # of each tracker by its name
    # steps between training episodes shown as text; 0: none, also not of evaluations
    texts_every: NonNegativeInt = 10
    # an animated episode per evaluation and domain, if the environment draws its states
    pictures: bool = True


class FailuresSection(Section):
    """When to end a run whose groups only fail; see ``learner/give_up.py``."""

    # if the first n groups fail; null: 4 * train.groups_per_step; 0: never
    give_up_after: NonNegativeInt | None = None
    # share of failures, by domain weights, among the last max(4 * groups_per_step, 32) groups of
    # each domain; 1.0: all
    max_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    # seconds with all hubs of a domain broken and nothing trained; 12 times that if it ever worked;
    # 0: never
    give_up_after_s: NonNegativeFloat = 600.0
