"""The section ``rollout``: which engine, how it samples and takes new weights."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from broker.errors import ConfigError
from broker.settings.config import Section
from broker.settings.registry import known, resolve
from broker.settings.sections import parse
from rollout.engines import ENGINE_ARGS, ENGINES, WEIGHTLESS

ACTOR: Final = "actor"


class RolloutSection(Section):
    """Settings of a generation server."""

    engine: str = "hf"  # a name of the registry in rollout/engines
    engine_args: dict[str, Any] = Field(default_factory=dict)
    policy: str = ACTOR  # whose policy these servers offer; only the actor's weights follow the learner's
    model_path: str | None = None  # weights of another policy than the actor; None: those that the run started from
    max_running: PositiveInt = 64  # requests in one decode batch
    max_context_tokens: PositiveInt = 4096  # prompt and output together
    prefill_tokens: PositiveInt = 4096  # context tokens of one pass
    prefix_cache: bool = True
    update_mode: Literal["keep", "recompute", "abort"] = "keep"  # what happens to requests in flight at new weights
    http_port: Annotated[int, Field(ge=0, le=65535)] | None = None  # OpenAI-compatible HTTP API there; 0 any free port, null none
    snapshot: str | None = None  # folder or http address to start from while the learner cannot be had: train.weights_snapshot_every
    snapshot_only: bool = False  # never ask the learner for weights: take those alone that are written
    num_threads: NonNegativeInt = 0  # torch threads, 0 leaves the default
    drain_timeout_s: PositiveFloat = 30.0


def check(config: dict[str, Any]) -> None:
    """What the section alone cannot say: the engine exists and takes its arguments, and every domain's context fits.

    Raises:
        ConfigError: names the key, its value and what is allowed.
    """
    section = RolloutSection.model_validate(config.get("rollout") or {})
    check_engine(section)
    if section.engine in WEIGHTLESS and section.policy == ACTOR:
        raise ConfigError(
            "rollout.policy", ACTOR, f"engine {section.engine} does not follow the learner's weights; name another, for example judge"
        )
    if section.model_path is not None and section.policy == ACTOR:
        raise ConfigError("rollout.model_path", section.model_path, "null with rollout.policy actor, whose weights come from the learner")
    if section.snapshot is not None and section.policy != ACTOR:
        raise ConfigError("rollout.snapshot", section.snapshot, f"null with rollout.policy {section.policy}, whose weights never change")
    if section.snapshot_only and section.snapshot is None:
        raise ConfigError("rollout.snapshot_only", True, "false without rollout.snapshot")
    evaluation = config.get("eval") or {}
    if "random" in (evaluation.get("baseline"), *(evaluation.get("against") or ())):  # ``rlearner up`` starts its server, with these
        parse("eval.baseline_args", evaluation.get("baseline_args") or {}, resolve("engine_args", "random", ENGINE_ARGS))
    for name, domain in (config.get("domains") or {}).items():
        longest = domain.get("max_context_tokens", 0)
        if longest > section.max_context_tokens:
            raise ConfigError(
                f"domains.{name}.max_context_tokens", longest, f"at most rollout.max_context_tokens ({section.max_context_tokens})"
            )


def check_engine(section: RolloutSection) -> None:
    """The engine is known and its arguments are ones it takes; nothing heavy is imported for those of the registry.

    Raises:
        ConfigError: otherwise.
    """
    check_engine_name(section.engine)
    if section.engine in ENGINE_ARGS:
        parse("rollout.engine_args", section.engine_args, resolve("engine_args", section.engine, ENGINE_ARGS))


def check_engine_name(name: str) -> None:
    """Someone has an engine of that name; a dotted path or a file is taken at its word.

    Raises:
        ConfigError: nobody has.
    """
    if name not in known("engines", ENGINES) and ":" not in name:
        try:
            resolve("engines", name, ENGINES)
        except ConfigError as error:
            raise ConfigError("rollout.engine", name, error.allowed) from None
