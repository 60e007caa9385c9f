"""Checks ``rollout.exact``: engine and learner must compute the same bits."""

from __future__ import annotations

from typing import Any, Final

from broker.contract.wire import ACTOR
from broker.errors import ConfigError
from broker.settings.run_settings import RunSettings
from rlearner_text.families import family_at

# Sampling that changes a distribution, which the learner does not, and what leaves it unchanged.
_FILTERS: Final = (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0))


def check_exact(settings: RunSettings) -> None:
    """Check that the learner computes the same logprobs as the engine, if ``rollout.exact`` is set.

    Raises:
        ConfigError: if a setting lets them compute otherwise; names it and what is allowed.
    """
    section = settings.rollout
    # A server of another policy may share the section of the run.
    if not section.exact or section.policy != ACTOR:
        return
    if section.engine != "hf":
        allowed = f"false with rollout.engine {section.engine}: only hf computes as the learner"
        raise ConfigError("rollout.exact", True, allowed)
    for key, value, allowed in _differences(settings):
        if value != allowed:
            raise ConfigError(key, value, f"{_format(allowed)} with rollout.exact")
    family = family_at(settings.model.path)
    if family is not None and family.kind != "dense":
        allowed = f"false with {family.model_type}: only dense models compute a token by itself"
        raise ConfigError("rollout.exact", True, allowed)
    for name, domain in settings.trained_domains.items():
        for option, neutral in _FILTERS:
            if (value := getattr(domain.sampling, option)) != neutral:
                allowed = f"{neutral:g} with rollout.exact: the learner scores the whole vocabulary"
                raise ConfigError(f"domains.{name}.sampling.{option}", value, allowed)


def _differences(settings: RunSettings) -> list[tuple[str, Any, Any]]:
    """Return keys that must have one value: key, value, and the one that is allowed."""
    section = settings.rollout
    train = settings.train
    dtype = settings.model.dtype
    return [
        ("train.backend", train.backend, "torch"),
        ("train.ranks", train.ranks, 1),
        ("train.lora", None if train.lora is None else train.lora.model_dump(), None),
        ("train.compile", train.compile, False),
        ("rollout.dtype", section.dtype or dtype, dtype),
        ("train.weights_dtype", train.weights_dtype or dtype, dtype),
        ("rollout.num_threads", section.num_threads, train.num_threads),
    ]


def _format(value: Any) -> str:
    """Return a value as YAML has it."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
