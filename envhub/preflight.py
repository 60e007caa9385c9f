"""Checks this role's part of a configuration on a machine, before anything starts."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from broker.settings.preflight import PreflightFinding
from broker.settings.run_settings import RunSettings
from broker.settings.secret import SecretRef
from envhub.agents.imports import imported, missing
from envhub.config import check_templates
from envhub.domain import load_domains
from envhub.envs.agent import PYTHON, AgentArgs, AgentEnvironment, plain_env
from rlearner_text.hub import check_hub_name, is_local
from rlearner_text.model_checks import check_trained_model

# a variable that is not set, for endpoints that need no key
NO_KEY: Final = "RLEARNER_NO_KEY"


def preflight_findings(settings: RunSettings) -> list[PreflightFinding]:
    """Check that the programs of ``env: agent`` find what they import.

    Raises:
        ConfigError: if the chat template of a model on the hub cannot be used.
    """
    _check_hub_template(settings)
    findings = [*_count_rows(settings), *_check_endpoints(settings)]
    if not any(domain.env == "agent" for domain in settings.domains.values()):
        return [finding for finding in findings if finding is not None]
    for name, domain in load_domains(settings).items():
        if issubclass(domain.environment, AgentEnvironment) and isinstance(domain.args, AgentArgs):
            findings.append(_check_program(f"domains.{name}.env_args", domain.args))
    return [finding for finding in findings if finding is not None]


def _check_endpoints(settings: RunSettings) -> list[PreflightFinding]:
    """Check that the endpoints of policies that play answer."""
    from rlearner_text.openai.endpoint_check import check_endpoint

    return [
        check_endpoint(
            f"policies.{name}",
            policy.base_url,
            policy.api_key or SecretRef(env=NO_KEY),
            is_named=policy.api_key is not None,
            is_needed=False,
        )
        for name, policy in settings.policies.items()
        if policy.base_url is not None
    ]


def _count_rows(settings: RunSettings) -> list[PreflightFinding | None]:
    """Count rows that stand out, such as duplicates, in the data sets of the domains."""
    tokenizer = check_trained_model(settings.model, has_weights=False)
    findings: list[PreflightFinding | None] = []
    for name, domain in load_domains(settings).items():
        limit = domain.section.max_context_tokens

        def is_long(text: str, limit: int = limit) -> bool:
            # A token is a byte or more.
            if tokenizer is None or len(text.encode()) < limit:
                return False
            return len(tokenizer.encode(text)) >= limit

        if counts := domain.environment.count_rows(domain.args, is_long):
            remedy = f"domains.{name}.max_context_tokens" if " 0 too long" not in counts else ""
            findings.append(PreflightFinding("data", f"domains.{name}", "warning", counts, remedy))
    return findings


def _check_hub_template(settings: RunSettings) -> None:
    model = settings.model
    path = model.path
    if (
        path is None
        or is_local(path)
        or any(finding.status != "ok" for finding in check_hub_name(path, "model.path"))
    ):
        # checked already, or reported by the rollout server's checks
        return
    check_templates(settings, check_trained_model(model, has_weights=False, from_hub=True))


def references(settings: RunSettings) -> dict[str, list[tuple[str, str]]]:
    """Return the reference answers of a validated config's domains, with their places."""
    return {
        name: domain.environment.references(domain.args)
        for name, domain in load_domains(settings).items()
    }


def task_rows(settings: RunSettings) -> dict[str, Iterator[tuple[str, Mapping[str, Any]]]]:
    """Return the rows of a validated config's domains, with their places, read as they are used."""
    return {
        name: domain.environment.task_rows(domain.args)
        for name, domain in load_domains(settings).items()
    }


def _check_program(key: str, args: AgentArgs) -> PreflightFinding | None:
    """Check one program; None if it is not a Python file that can be found."""
    interpreter, file = _program_file(args)
    if file is None or not file.is_file():
        return None
    try:
        names = imported(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError) as error:
        return PreflightFinding(
            "agents", key, "missing", f"{file} cannot be run: {error}", f"{interpreter} {file}"
        )
    lacking = missing(interpreter, names, str(file.parent.absolute()), plain_env(args), args.cwd)
    if not lacking:
        return PreflightFinding("agents", key, "ok", f"{file} finds what it imports")
    problem = f"{file} imports {', '.join(lacking)}, not installed"
    fix = f"-m pip install {' '.join(lacking)}"
    return PreflightFinding("agents", key, "missing", problem, f"{interpreter} {fix}")


def _program_file(args: AgentArgs) -> tuple[str, Path | None]:
    """Return the program's interpreter and its file."""
    if args.function:
        source = args.function.rpartition(":")[0]
        return sys.executable, Path(source) if source.endswith(".py") else _module_file(source)
    program, *arguments = args.command
    if (
        not Path(program).name.startswith(PYTHON)
        or not arguments
        or not arguments[0].endswith(".py")
    ):
        return program, None
    return sys.executable if program == PYTHON else program, Path(args.cwd or "", arguments[0])


def _module_file(module: str) -> Path | None:
    """Return a module's file, by its top-level package: finding a submodule would import it."""
    top, *inner = module.split(".")
    try:
        spec = find_spec(top)
    except (ImportError, ValueError):
        return None
    if spec is None or not spec.origin:
        return None
    if not inner:
        return Path(spec.origin)
    return Path(spec.origin).parent.joinpath(*inner).with_suffix(".py")
