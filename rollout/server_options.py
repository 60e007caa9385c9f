"""Settings of one rollout server: the run's section, command-line options and overrides."""

from __future__ import annotations

import argparse
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from broker.errors import UserError
from broker.settings.config import UserSettings
from broker.settings.run_settings import RunSettings
from broker.settings.sections import parse
from rlearner_text.config import check_model_path
from rlearner_text.hub import is_local
from rollout.checks import check, check_engine_name, policy_section, teacher_section
from rollout.config import RolloutSection


def server_section(settings: RunSettings, options: argparse.Namespace) -> RolloutSection:
    """Return the run's section ``rollout`` with this server's options and ``key=value`` overrides
    applied.

    The section of a server for a teacher of the run is what section ``teachers`` says, and
    ``policies`` for those that play. Only this section and its relation to the domains are checked:
    files of other roles need not exist on this machine. An engine other than the run's own does not
    inherit its ``engine_args``.

    Raises:
        UserError: if an override is malformed, or a value is not allowed.
    """
    section = settings.rollout.model_dump(mode="json")
    if (teacher := _served_teacher(settings, options.policy)) is not None:
        section = teacher_section(settings, teacher).to_plain()
    elif (served := settings.policies.get(options.policy or "")) and served.model_path is not None:
        section = policy_section(settings, options.policy).to_plain()
    if options.engine is not None:
        if options.engine != section["engine"]:
            section["engine_args"] = {}
        section["engine"] = options.engine
    if options.policy is not None:
        section["policy"] = options.policy
    if options.model is not None:
        section["model_path"] = options.model
    if options.snapshot is not None:
        section["snapshot"] = options.snapshot
    if options.http is not None:
        section["http_port"] = options.http
    for name in ("http_bind", "tls_cert", "tls_key"):
        if (value := getattr(options, name)) is not None:
            section[name if name == "http_bind" else f"http_{name}"] = value
    for override in options.overrides:
        section = apply_override(section, override)
    parsed = parse("rollout", section, RolloutSection)
    check(settings.model_copy(update={"rollout": parsed}))
    return parsed


def _served_teacher(settings: RunSettings, policy: str | None) -> str | None:
    """Return the teacher with weights of its own that a policy belongs to."""
    named = [
        name
        for name, teacher in settings.teachers.items()
        if (teacher.policy or name) == policy and teacher.model_path is not None
    ]
    return next(iter(named), None)


def check_arguments(options: argparse.Namespace) -> None:
    """Reject a command line that is wrong for any run.

    Raises:
        UserError: if an override is malformed, a value is not allowed, or the engine or model does
            not exist.
    """
    section: UserSettings = {} if options.engine is None else {"engine": options.engine}
    for override in options.overrides:
        section = apply_override(section, override)
    check_engine_name(parse("rollout", section, RolloutSection).engine)
    if options.model is not None and is_local(options.model):
        check_model_path(options.model, "--model")


def apply_override(section: UserSettings, override: str) -> UserSettings:
    """Return the section with one ``key=value`` applied; the value is YAML, the key may begin with
    ``rollout.``.

    Raises:
        UserError: if the override is not of the form key=value.
    """
    key, equals, _ = override.partition("=")
    if not equals or not key:
        raise UserError(
            f"override {override!r} is not allowed; write key=value, for example max_running=32"
        )
    try:
        overrides = OmegaConf.from_dotlist([override.removeprefix("rollout.")])
        merged: Any = OmegaConf.to_container(
            OmegaConf.merge(OmegaConf.create(section), overrides), resolve=False
        )
    except (OmegaConfBaseException, YAMLError, ValueError, TypeError) as error:
        raise UserError(
            f"override {override!r} is not allowed; {' '.join(str(error).split())}"
        ) from None
    return dict(merged)
