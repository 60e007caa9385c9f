"""The configuration section ``rollout``: engine, capacity and weight updates."""

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

    engine: str = "hf"  # a name in the registry of rollout/engines, or MODULE:CLASS
    engine_args: dict[str, Any] = Field(default_factory=dict)
    policy: str = ACTOR  # policy that these servers offer; only the actor follows the learner's weights
    model_path: str | None = None  # weights of a policy other than the actor; None: those that the run started from
    max_running: PositiveInt = 64  # requests in one decode batch
    max_context_tokens: PositiveInt = 4096  # prompt and output together
    prefill_tokens: PositiveInt = 4096  # context tokens in one forward pass
    prefix_cache: bool = True
    update_mode: Literal["keep", "recompute", "abort"] = "keep"  # what happens to requests in flight at new weights
    http_port: Annotated[int, Field(ge=0, le=65535)] | None = None  # OpenAI-compatible API; 0: any free port
    snapshot: str | None = None  # train.weights_snapshot_every: folder or URL to start from without the learner
    snapshot_only: bool = False  # never request weights from the learner, only read snapshots
    num_threads: NonNegativeInt = 0  # torch threads; 0: torch's default
    drain_timeout_s: PositiveFloat = 30.0


def check(config: dict[str, Any]) -> None:
    """Check that the engine accepts its arguments and that every domain's context fits.

    Raises:
        ConfigError: if a value is not allowed; names the key, its value and what is allowed.
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
    if "random" in (evaluation.get("baseline"), *(evaluation.get("against") or ())):  # ``rlearner up`` serves it
        parse("eval.baseline_args", evaluation.get("baseline_args") or {}, resolve("engine_args", "random", ENGINE_ARGS))
    for name, domain in (config.get("domains") or {}).items():
        longest = domain.get("max_context_tokens", 0)
        if longest > section.max_context_tokens:
            raise ConfigError(
                f"domains.{name}.max_context_tokens", longest, f"at most rollout.max_context_tokens ({section.max_context_tokens})"
            )


def check_engine(section: RolloutSection) -> None:
    """Check the engine's name and arguments without importing the heavy libraries of registered engines.

    Raises:
        ConfigError: if the engine is unknown or does not accept its arguments.
    """
    check_engine_name(section.engine)
    if section.engine in ENGINE_ARGS:
        parse("rollout.engine_args", section.engine_args, resolve("engine_args", section.engine, ENGINE_ARGS))


def check_engine_name(name: str) -> None:
    """Check that an engine of this name exists; a name with a colon (MODULE:CLASS or a file) is not checked.

    Raises:
        ConfigError: if the name is unknown.
    """
    if name not in known("engines", ENGINES) and ":" not in name:
        try:
            resolve("engines", name, ENGINES)
        except ConfigError as error:
            raise ConfigError("rollout.engine", name, error.allowed) from None
