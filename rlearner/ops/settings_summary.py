"""Sums up the settings of a run in ten lines, for ``rlearner check``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from broker.settings.config import DomainSection
from broker.settings.run_settings import RunSettings
from broker.settings.schema.model import ModelSection
from broker.settings.schema.training import OptimizationSection
from learner.offline.config import OfflineSettings

WIDTH: Final = 11  # of the names before the values


def summarize_run(settings: RunSettings, name: str) -> list[str]:
    """Return ten lines about a run: what is trained on what, how, and by which processes."""
    train = settings.train
    algorithm = settings.algorithm
    rollout = settings.rollout
    filters = "equal rewards filtered" * algorithm.filter_zero_variance
    on_late = "older groups wait" if train.on_late == "wait" else "older groups are dropped"
    group_sizes = sorted({domain.group_size for domain in settings.trained_domains.values()})
    episodes = " or ".join(map(str, group_sizes))
    entries = {
        "run": [name, f"in {settings.run.dir}"],
        "model": _describe_model(settings.model),
        "domains": [_describe_domain(*item) for item in settings.domains.items()],
        "rewards": [_describe_rewards(*item) for item in settings.domains.items()],
        "algorithm": [algorithm.adv_estimator, algorithm.pg_variant, filters],
        "step": [
            f"{train.groups_per_step} groups of {episodes} episodes",
            f"samples at most {_count(train.max_staleness, 'version')} old ({on_late})",
        ],
        "training": [_count(train.steps, "step"), *_describe_optimizer(train)],
        "rollout": [
            f"engine {rollout.engine}",
            f"{_count(rollout.max_running, 'request')} at once",
            f"{_count(rollout.max_context_tokens, 'token')} of context",
            f"{_count(settings.envhub.n, 'environment')} a hub",
        ],
        "evaluation": _describe_evaluation(settings),
        "kept": [
            _describe_interval("checkpoints", settings.checkpoint.every_steps),
            _describe_keep(settings.samples.keep),
        ],
    }
    return _lines(entries)


def summarize_offline(settings: OfflineSettings, pipeline: str, name: str) -> list[str]:
    """Return the lines about an offline training, by ``rlearner sft``, ``dpo``, ``rm`` …"""
    train = settings.train
    held_out = settings.data.eval or "a share of the rows"
    entries = {
        "run": [name, f"in {settings.run.dir}"],
        "pipeline": [pipeline],
        "model": _describe_model(settings.model),
        "data": [settings.data.train, f"held out: {held_out}"],
        "training": [_count(train.steps, "step"), *_describe_optimizer(train)],
        "kept": [_describe_interval("checkpoints", settings.checkpoint.every_steps)],
    }
    return _lines(entries)


def _lines(entries: Mapping[str, Sequence[str]]) -> list[str]:
    return [f"{name:<{WIDTH}} {', '.join(filter(None, parts))}" for name, parts in entries.items()]


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"


def _describe_model(model: ModelSection) -> list[str]:
    return [model.path or "a small generated one (model.path: null)", model.dtype]


def _describe_domain(name: str, domain: DomainSection) -> str:
    weight = f"weight {domain.weight:g}" if domain.weight else "only evaluated"
    return f"{name} ({domain.env}, {_count(domain.max_turns, 'turn')}, {weight})"


def _describe_rewards(name: str, domain: DomainSection) -> str:
    names = [reward.name for reward in domain.rewards]
    return f"{name}: {' + '.join(names) or 'of the environment'}"


def _describe_optimizer(train: OptimizationSection) -> list[str]:
    adapters = f"LoRA of rank {train.lora.rank}" if train.lora is not None else ""
    return [f"backend {train.backend}", f"lr {train.lr:g} {train.lr_schedule}", adapters]


def _describe_evaluation(settings: RunSettings) -> list[str]:
    section = settings.eval
    if not section.every_steps:
        return ["never (eval.every_steps)"]
    parts = [f"every {_count(section.every_steps, 'step')}"]
    for name, domain in settings.evaluated_domains.items():
        own = section.of_domain(domain)
        episodes = f" x {own.group_size} episodes" if own.group_size > 1 else ""
        parts.append(f"{own.tasks} tasks of {name}{episodes}")
    return parts


def _describe_keep(keep: bool | int) -> str:
    if keep is True:
        return "all samples"
    if keep is False:
        return "no samples (samples.keep)"
    return f"samples of the newest {_count(keep, 'group')}"


def _describe_interval(what: str, every_steps: int) -> str:
    return f"{what} every {_count(every_steps, 'step')}" if every_steps else f"no {what}"


def format_end(num_missing: int) -> str:
    """Return the last line of a check that found no mistake."""
    if not num_missing:
        return "ok"
    verb = "is" if num_missing == 1 else "are"
    return f"ok; {_count(num_missing, 'thing')} that it needs {verb} missing on this machine"
