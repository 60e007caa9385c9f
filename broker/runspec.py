"""Configuration and the RunSpec: load, merge, override, validate whole; publish for others to join."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeVar

from broker.config import Section

# Section -> "module:attribute" of its pydantic model. Resolved lazily, so that no role imports another's code to run.
# A value for `domains` is a mapping of names to DomainSection.
SECTIONS: Final[dict[str, str]] = {
    "run": "broker.config:RunSection",
    "broker": "broker.config:BrokerSection",
    "domains": "broker.config:DomainSection",
    "model": "text.config:ModelSection",
    "train": "learner.config:TrainSection",
    "algorithm": "learner.config:AlgorithmSection",
    "warm_start": "learner.config:WarmStartSection",
    "eval": "learner.config:EvalSection",
    "checkpoint": "learner.config:CheckpointSection",
    "trackers": "learner.config:TrackersSection",
    "rollout": "rollout.config:RolloutSection",
    "envhub": "envhub.config:EnvhubSection",
    "rewardhub": "rewardhub.config:RewardhubSection",
}

# Checks across sections, each a function of the resolved config that raises ConfigError.
CHECKS: Final[tuple[str, ...]] = ("learner.config:check", "rollout.config:check", "envhub.config:check", "rewardhub.config:check")

S = TypeVar("S", bound=Section)


def load(path: str, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Read a YAML file with what it inherits (key ``inherit``: file name or list, relative to it), apply ``key=value`` overrides.

    Raises:
        UserError: missing or malformed file, override that is no key=value.
    """
    raise NotImplementedError


def validate(config: dict[str, Any]) -> dict[str, Any]:
    """Check every section and every combination; the same config with all defaults filled in, JSON-able.

    Raises:
        ConfigError: names the first bad key (``train.lr``), its value and what is allowed; unknown keys suggest the nearest.
    """
    raise NotImplementedError


def section(config: dict[str, Any], name: str, model: type[S]) -> S:
    """One section of a validated config, typed."""
    return model.model_validate(config.get(name) or {})


def domains(config: dict[str, Any]) -> dict[str, Any]:
    """The domains of a validated config by name, as DomainSection."""
    raise NotImplementedError
