"""Checks of the section ``rollout`` before anything starts, without importing an engine."""

from __future__ import annotations

from typing import Final

from broker.contract.wire import ACTOR
from broker.errors import ConfigError, UserError
from broker.settings.config import Sampling, UserSettings
from broker.settings.registry import known, resolve
from broker.settings.run_settings import RunSettings
from broker.settings.schema.model import ModelSection
from broker.settings.schema.policies import PolicySection
from broker.settings.schema.teaching import TeacherSection
from broker.settings.sections import parse
from rlearner_text.families import check_served, family_at
from rlearner_text.model_checks import known_positions
from rollout.config import RolloutSection
from rollout.engines import ENGINE_ARGS, ENGINES
from rollout.engines.args import EngineArgs
from rollout.exact_checks import check_exact

_OWN_MODEL: Final = ("hf", "vllm", "sglang")  # engines that compute


def check(settings: RunSettings) -> None:
    """Check that the engine accepts its arguments and that every domain's context and sampling fit.

    Raises:
        ConfigError: if a value is not allowed; names the key, its value and what is allowed.
    """
    section = settings.rollout
    check_engine(section)
    declared = declaration(section.engine)
    if declared is not None and not declared.follows_weights and section.policy == ACTOR:
        allowed = f"engine {section.engine} does not follow the learner's weights; name another, for example judge"
        raise ConfigError("rollout.policy", ACTOR, allowed)
    if section.model_path is not None and section.policy == ACTOR:
        allowed = "null with rollout.policy actor, whose weights come from the learner"
        raise ConfigError("rollout.model_path", section.model_path, allowed)
    if section.engine == "hf" and section.policy == ACTOR:
        check_served(family_at(settings.model.path))
    if section.snapshot is not None and section.policy != ACTOR:
        allowed = f"null with rollout.policy {section.policy}, whose weights never change"
        raise ConfigError("rollout.snapshot", section.snapshot, allowed)
    if section.snapshot_only and section.snapshot is None:
        raise ConfigError("rollout.snapshot_only", True, "false without rollout.snapshot")
    check_exact(settings)
    if (section.http_tls_cert is None) != (section.http_tls_key is None):
        allowed = "null, or set together with rollout.http_tls_key (--tls-cert, --tls-key)"
        raise ConfigError("rollout.http_tls_cert", section.http_tls_cert, allowed)
    if section.engine in _OWN_MODEL:
        own_model = ModelSection(path=section.model_path)
        check_positions(settings.model if section.model_path is None else own_model, section)
    _check_teachers(settings)
    _check_policies(settings)
    evaluation = settings.eval
    # ``rlearner up`` serves it
    if "random" in (evaluation.baseline, *evaluation.against):
        random_args = resolve("engine_args", "random", ENGINE_ARGS)
        parse("eval.baseline_args", evaluation.baseline_args, random_args)
    for name, domain in settings.domains.items():
        if declared is not None and not declared.processed_logprobs:
            _refuse_filters(name, domain.sampling, section.engine)
        longest = domain.max_context_tokens
        if longest > section.max_context_tokens:
            allowed = f"at most rollout.max_context_tokens ({section.max_context_tokens})"
            raise ConfigError(f"domains.{name}.max_context_tokens", longest, allowed)


def teacher_section(settings: RunSettings, name: str) -> RolloutSection:
    """Return the section ``rollout`` of the servers of a teacher with weights of its own.

    Raises:
        ConfigError: if the engine does not accept its arguments.
    """
    teacher = settings.teachers[name]
    return _section_of(f"teachers.{name}", teacher.policy or name, teacher, settings)


def policy_section(settings: RunSettings, name: str) -> RolloutSection:
    """Return the section ``rollout`` of the servers of a policy with weights of its own.

    Raises:
        ConfigError: if the engine does not accept its arguments.
    """
    return _section_of(f"policies.{name}", name, settings.policies[name], settings)


def _section_of(
    key: str, policy: str, model: TeacherSection | PolicySection, settings: RunSettings
) -> RolloutSection:
    engine = model.engine or settings.rollout.engine
    changes: UserSettings = {
        "engine": engine,
        "engine_args": model.engine_args,
        "policy": policy,
        "model_path": model.model_path,
        "dtype": model.dtype or settings.rollout.dtype,
        # those are of the policy that is trained
        "snapshot": None,
        "snapshot_only": False,
        "http_port": None,
    }
    if model.engine is None and not model.engine_args:
        del changes["engine_args"]
    if (declared := declaration(engine)) is not None:
        parse(f"{key}.engine_args", model.engine_args, declared)
    return parse("rollout", settings.rollout.to_plain() | changes, RolloutSection)


def _check_teachers(settings: RunSettings) -> None:
    """Check that the engine of each teacher can score a context."""
    for name, teacher in settings.teachers.items():
        section = teacher_section(settings, name)
        declared = declaration(section.engine)
        if declared is not None and not declared.scores_contexts:
            classes = {engine: declaration(engine) for engine in ENGINE_ARGS}
            scoring = [
                engine
                for engine, declared in classes.items()
                if declared is not None and declared.scores_contexts
            ]
            allowed = f"an engine that can score a context: {', '.join(scoring)}"
            raise ConfigError(f"teachers.{name}.engine", section.engine, allowed)
        if teacher.model_path is not None and section.engine in _OWN_MODEL:
            check_positions(ModelSection(path=teacher.model_path), section)


def _check_policies(settings: RunSettings) -> None:
    """Check the servers of each policy that plays with weights of its own."""
    for name, policy in settings.policies.items():
        if policy.model_path is None:
            continue
        section = policy_section(settings, name)
        check_engine_name(section.engine)
        if section.engine in _OWN_MODEL:
            check_positions(ModelSection(path=policy.model_path), section)


def check_positions(model: ModelSection, section: RolloutSection) -> None:
    """Check that a model on this host has a position for every token of a context.

    Raises:
        ConfigError: if it has fewer.
    """
    positions = known_positions(model)
    if positions is not None and section.max_context_tokens > positions:
        allowed = f"at most {positions}, the positions of the model"
        raise ConfigError("rollout.max_context_tokens", section.max_context_tokens, allowed)


def declaration(engine: str) -> type[EngineArgs] | None:
    """Return what an engine of the registry declares about itself; None for one named by path,
    which is trusted.
    """
    return resolve("engine_args", engine, ENGINE_ARGS) if engine in ENGINE_ARGS else None


def refuse_sleepless(engine: str) -> None:
    """Refuse to share devices with an engine that is known not to leave its own.

    Raises:
        UserError: if it does not.
    """
    if (declared := declaration(engine)) is not None and not declared.sleeps:
        able = ", ".join(
            sorted(
                name
                for name in ENGINE_ARGS
                if (engine_args := declaration(name)) and engine_args.sleeps
            )
        )
        raise UserError(
            f"--share-gpus: engine {engine} cannot free its device for others; these can: {able}"
        )


def _refuse_filters(name: str, sampling: Sampling, engine: str) -> None:
    declared = {engine_name: declaration(engine_name) for engine_name in sorted(ENGINE_ARGS)}
    able = ", ".join(
        engine_name
        for engine_name, engine_args in declared.items()
        if engine_args is not None and engine_args.processed_logprobs
    )
    for option, off in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
        if (value := getattr(sampling, option)) != off:
            reason = f"rollout.engine {engine}, which does not return the logprobs of what is left"
            allowed = f"{off:g} with {reason}; these do: {able}"
            raise ConfigError(f"domains.{name}.sampling.{option}", value, allowed)


def check_engine(section: RolloutSection) -> None:
    """Check the engine's name and arguments without importing the heavy libraries of registered
    engines.

    Raises:
        ConfigError: if the engine is unknown or does not accept its arguments.
    """
    check_engine_name(section.engine)
    if section.engine in ENGINE_ARGS:
        parse(
            "rollout.engine_args",
            section.engine_args,
            resolve("engine_args", section.engine, ENGINE_ARGS),
        )


def check_engine_name(name: str) -> None:
    """Check that an engine of this name exists; a name with a colon (MODULE:CLASS or a file) is not
    checked.

    Raises:
        ConfigError: if the name is unknown.
    """
    if name not in known("engines", ENGINES) and ":" not in name:
        try:
            resolve("engines", name, ENGINES)
        except ConfigError as error:
            raise ConfigError("rollout.engine", name, error.allowed) from None
