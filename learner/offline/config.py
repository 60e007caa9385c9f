"""Defines the sections of an offline configuration; some are those of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from broker.errors import ConfigError, UserError
from broker.settings import runspec
from broker.settings.config import BrokerSection, RunSection, Section, SectionGroup, UserSettings
from broker.settings.registry import resolve
from broker.settings.schema.model import ModelSection
from broker.settings.schema.serving import RolloutSection
from learner.algorithm.traits import preference_traits
from learner.checks import check_family, check_layers, check_name, check_options
from learner.config import (
    Beta,
    CheckpointSection,
    OptimizationSection,
    TrackersSection,
    TrainSection,
)
from rlearner_text.model_checks import resolve_model
from rlearner_text.rows.sources import DataSource

# These keys and sections may differ when a run resumes.
_FREE_KEYS: Final = ("train.steps", "train.num_threads", "train.device")
_FREE_SECTIONS: Final = ("eval", "checkpoint", "trackers", "broker", "rollout")
# Of data sets, as the commands name them.
COLUMNS: Final = (
    "messages", "conversations", "prompt", "completion", "response", "chosen", "rejected", "tools",
)  # fmt: skip


class DataSection(Section):
    """Rows for training and held-out rows."""

    # a JSON Lines, JSON, Parquet or CSV file, a folder of them, one that datasets saved, or a name
    # on the Hugging Face hub with its commit, owner/name@commit
    train: str
    eval: str | None = None  # held-out rows; null: ``eval_split`` of ``train``, or ``eval_share``
    subset: str | None = None  # of a data set that has several
    split: str | None = None  # of ``train``; null if it has one
    eval_split: str | None = None  # of ``eval``, or of ``train`` without ``eval``
    max_rows: PositiveInt | None = None  # of each: at most this many, the first ones
    # our names of columns to those of the data set, for example prompt: extra_info.question
    columns: dict[str, str] | None = None
    # leave out training rows that have the same words as an earlier one
    deduplicate: bool = False
    # leave out training rows whose question stands in the held-out rows of ``eval`` or
    # ``eval_split``, or has 13 words in a row in common with one
    decontaminate: bool = False
    # of the rows of ``train``, taken from its end
    eval_share: Annotated[float, Field(ge=0, lt=1)] = 0.05
    # longer rows are cut (sft, distill) or omitted (dpo, rm); null: the model's
    max_tokens: PositiveInt | None = None

    def training_source(self) -> DataSource:
        """Return the data set to train on."""
        return DataSource(self.train, self.subset or "", self.split or "", self.max_rows)

    def held_out_source(self) -> DataSource | None:
        """Return the data set of held-out rows; None: they are a share of the other."""
        if self.eval is None and not self.eval_split:
            return None
        path = self.eval or self.train
        return DataSource(path, self.subset or "", self.eval_split or "", self.max_rows)

    def sources(self) -> dict[str, DataSource | None]:
        """Return the data sets by their keys."""
        return {"data.train": self.training_source(), "data.eval": self.held_out_source()}

    def digests(self) -> dict[str, str]:
        """Return the digest of each data set by its path.

        Raises:
            UserError: if a file cannot be read.
        """
        sources = (self.training_source(), self.held_out_source())
        return {source.path: source.digest() for source in sources if source is not None}


class OfflineTrainSection(OptimizationSection):
    """Number and size of the steps, and the learning rate."""

    steps: Annotated[PositiveInt, Field(le=2**31 - 1)] = 300
    batch_size: PositiveInt = 32  # rows of one step
    lr: PositiveFloat = 1e-5
    lr_schedule: Literal["constant", "linear", "cosine"] = "linear"
    warmup_steps: NonNegativeInt | None = None  # null: a twentieth of the steps
    betas: tuple[Beta, Beta] = (0.9, 0.95)


class HeldOutSection(Section):
    """Evaluation on held-out rows between steps."""

    every_steps: NonNegativeInt = 0  # 0: only after the last step
    rows: PositiveInt = 256  # at most this many, the first ones
    at_start: bool = True


class DpoSection(Section):
    """Preference loss and its reference."""

    loss: str = "dpo"  # dpo, ipo, outcome, or a path to your function
    beta: PositiveFloat = 0.1  # smaller: further from the reference; in ipo the paper's tau
    # dpo: share of pairs that are taken to be labelled the wrong way round
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    reference: str | None = None  # folder or hub name; null: the model that training starts from


class RewardModelSection(Section):
    """Loss of a reward model."""

    # weight of the squared sum of both scores of a pair, which draws scores to 0; 0 is off
    center: NonNegativeFloat = 0.0


class DistillSection(Section):
    """Teacher, and the divergence from it."""

    teacher: str  # folder or hub name
    kl: Literal["forward", "reverse"] = "forward"  # KL(teacher || student), KL(student || teacher)
    # the teacher's best candidates, and the rest of its mass as one; 0: the whole vocabulary
    top_k: NonNegativeInt = 0
    # use rollout servers that joined this run, instead of loading the teacher here
    served: bool = False
    timeout_s: PositiveFloat = 120.0  # served: longest wait for the response to one row
    concurrency: PositiveInt = 64  # served: rows requested at once


class OfflineSettings(SectionGroup):
    """The settings of ``rlearner sft``; other pipelines have more sections."""

    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    data: DataSection
    train: OfflineTrainSection = OfflineTrainSection()
    eval: HeldOutSection = HeldOutSection()
    checkpoint: CheckpointSection = CheckpointSection()
    trackers: TrackersSection = TrackersSection()


class DpoSettings(OfflineSettings):
    """The settings of ``rlearner dpo``."""

    dpo: DpoSection = DpoSection()


class RewardModelSettings(OfflineSettings):
    """The settings of ``rlearner rm``."""

    rm: RewardModelSection = RewardModelSection()


class DistillSettings(OfflineSettings):
    """The settings of ``rlearner distill``."""

    distill: DistillSection
    broker: BrokerSection = BrokerSection()
    rollout: RolloutSection = RolloutSection()


SETTINGS: Final[dict[str, type[OfflineSettings]]] = {
    "sft": OfflineSettings,
    "dpo": DpoSettings,
    "distill": DistillSettings,
    "rm": RewardModelSettings,
}
SECTIONS: Final[dict[str, dict[str, str]]] = {
    pipeline: runspec.name_sections(
        {name: field.annotation for name, field in settings.model_fields.items()}
    )
    for pipeline, settings in SETTINGS.items()
}


def pipeline_of(config: UserSettings) -> str:
    """Return the pipeline whose section a configuration has, ``sft`` without one."""
    return next((name for name in SECTIONS if name in config), "sft")


def parse_config(pipeline: str, config: UserSettings) -> OfflineSettings:
    """Return the settings of a pipeline with defaults, checked section by section.

    Raises:
        ConfigError: for the first key or value that is not allowed.
    """
    return SETTINGS[pipeline](**runspec.parse_sections(config, SECTIONS[pipeline]))


def validate_config(pipeline: str, config: UserSettings) -> OfflineSettings:
    """Return the settings of a pipeline with all defaults filled in.

    Raises:
        UserError: if the configuration is not for offline training.
        ConfigError: for the first key that cannot work.
    """
    from learner.backends import BACKENDS
    from learner.reporting.trackers import TRACKERS

    if "domains" in config:
        commands = "`rlearner up` and `rlearner start`"
        raise UserError(
            f"domains: with that section it is a configuration for {commands}, not for {pipeline}"
        )
    settings = parse_config(pipeline, config)
    train = settings.train
    if (name := train.backend) in ("deepspeed", "megatron"):
        allowed = f"torch, ddp or fsdp2: without a broker there is one rank, and no train.{name}"
        raise ConfigError("train.backend", name, allowed)
    model = resolve_model(settings.model)
    settings = settings.model_copy(update={"model": model})
    if (warmup := train.warmup_steps) is not None and warmup >= train.steps:
        raise ConfigError(
            "train.warmup_steps", warmup, f"below train.steps, which is {train.steps}"
        )
    check_name("train.backend", "backends", train.backend, BACKENDS)
    check_options(train)
    check_family(model, train)
    check_layers(train.lora, model)
    for name in settings.trackers.use:
        check_name("trackers.use", "trackers", name, TRACKERS)
    settings.data.training_source().check("data.train")
    if (held_out := settings.data.held_out_source()) is not None:
        held_out.check("data.eval")
    elif settings.data.decontaminate:
        allowed = "false without data.eval and data.eval_split: no rows to compare with"
        raise ConfigError("data.decontaminate", True, allowed)
    if wrong := sorted(set(settings.data.columns or ()) - set(COLUMNS)):
        allowed = f"the names here are {', '.join(COLUMNS)}"
        raise ConfigError("data.columns", wrong[0], allowed)
    if isinstance(settings, DpoSettings):
        _check_preference(settings.dpo)
    if isinstance(settings, DistillSettings):
        _check_distill(settings.distill, train)
    if isinstance(settings, RewardModelSettings):
        _check_reward_model(model, train)
    return settings


def _check_preference(dpo: DpoSection) -> None:
    from learner.offline import PREFERENCES

    check_name("dpo.loss", "preferences", dpo.loss, PREFERENCES)
    if not dpo.label_smoothing:
        return
    # Losses import torch, so they are only read if it is set.
    if not _takes_smoothing(dpo.loss):
        supporting = ", ".join(name for name in PREFERENCES if _takes_smoothing(name))
        allowed = f"0 with dpo.loss {dpo.loss}; it takes effect in {supporting}"
        raise ConfigError("dpo.label_smoothing", dpo.label_smoothing, allowed)


def _takes_smoothing(name: str) -> bool:
    from learner.offline import PREFERENCES

    traits = preference_traits(resolve("preferences", name, PREFERENCES))
    return traits is not None and traits.label_smoothing


def _check_distill(distill: DistillSection, train: OfflineTrainSection) -> None:
    if distill.served and not distill.top_k:
        raise ConfigError(
            "distill.top_k",
            0,
            "at least 1 with distill.served: whole distributions are too large to send",
        )
    if train.backend != "torch":
        raise ConfigError(
            "train.backend",
            train.backend,
            "torch: distillation needs the student's logits",
        )


def _check_reward_model(model: ModelSection, train: OfflineTrainSection) -> None:
    """Check what a classifier needs, as far as known before its model is loaded."""
    from learner.backends.models.auto_classes import classifier_problem
    from rlearner_text.hub import is_local, read_json

    if train.backend != "torch":
        allowed = "torch: no other backend trains a classifier"
        raise ConfigError("train.backend", train.backend, allowed)
    if model.path is None or not is_local(model.path):
        return
    config = read_json(Path(model.path).expanduser() / "config.json", model.path, "model.path")
    if problem := classifier_problem(config):
        raise ConfigError("model.path", model.path, problem)


def backend_train(train: OfflineTrainSection) -> TrainSection:
    """Return the settings in the form that backends take."""
    settings = {
        name: getattr(train, name)
        for name in OfflineTrainSection.model_fields
        if name != "batch_size"
    }
    if train.warmup_steps is None:
        settings["warmup_steps"] = min(max(1, train.steps // 20), train.steps - 1)
    return TrainSection(**settings)


def first_changed_key(
    old_config: Mapping[str, Any], new_config: Mapping[str, Any], prefix: str = ""
) -> str | None:
    """Return the first changed key that must not change when a run resumes, or None."""
    for key in sorted({*old_config, *new_config}):
        name = f"{prefix}{key}"
        old = old_config.get(key)
        new = new_config.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            if (changed_key := first_changed_key(old, new, f"{name}.")) is not None:
                return changed_key
        elif key not in old_config and new is False:
            continue  # an option that is younger than the run, and off
        elif old != new and not _may_change(name):
            return name
    return None


def _may_change(name: str) -> bool:
    return name in _FREE_KEYS or name.partition(".")[0] in _FREE_SECTIONS
