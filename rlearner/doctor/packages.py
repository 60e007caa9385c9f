"""Checks which Python packages are installed, and which are needed, without importing them."""

from __future__ import annotations

import shutil
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Final

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from broker.settings.preflight import PreflightFinding, Status
from rollout.checks import declaration
from rollout.engines import ENGINES

PROJECT: Final = "rlearner"
SOURCE: Final = Path(__file__).resolve().parents[2]
CORE: Final = (
    "torch",
    "transformers",
    "safetensors",
    "tokenizers",
    "numpy",
    "nats-py",
    "pyzmq",
    "msgspec",
    "pydantic",
)

# Versions with which the tests were run; the oldest by make test-oldest and on an H100.
TESTED: Final[Mapping[str, tuple[str, ...]]] = {
    "torch": ("2.11.0", "2.13.0"),
    "transformers": ("5.17.0", "5.19.0"),
}

# Plug-in name to distributions, of which one is enough. Other plug-ins need the extra of their
# name, if there is one.
TOOLS: Final[Mapping[str, tuple[str, ...]]] = {
    **{
        name: packages
        for name in ENGINES
        if (packages := getattr(declaration(name), "packages", ()))
    },
    "torch": ("torch",),
    "deepspeed": ("deepspeed",),
    "megatron": ("megatron-core",),
    "lora": ("peft",),
    "gem": ("gem-llm",),
}
WITHOUT_GPU: Final[Mapping[str, str]] = {
    "vllm": "make vllm-env  # vLLM's CPU build, in a separate environment"
}
# Commands to run after the usual one; gem-llm's own requirements contradict ours.
EXTRA_COMMANDS: Final[Mapping[str, str]] = {"gem": "pip install --no-deps gem-llm"}
AREAS: Final[Mapping[str, tuple[str, ...]]] = {
    "engines": tuple(name for name in ENGINES if name in TOOLS),
    "trainers": ("torch", "deepspeed", "megatron", "lora"),
}
HIDDEN: Final = frozenset({"dev"})

Installed = Callable[[str], str | None]


@dataclass(frozen=True)
class ProjectRequirements:
    """Package requirements of the project.

    Attributes:
        base: requirements without which nothing runs.
        extras: optional requirements by extra.
        folder: the source folder, None if the project was installed without it.
    """

    base: tuple[Requirement, ...]
    extras: Mapping[str, tuple[Requirement, ...]]
    folder: Path | None

    def install(self, extra: str) -> str:
        """Return the command that installs an extra, or without one the base requirements."""
        suffix = f"[{extra}]" if extra else ""
        command = f"{sys.executable} -m pip install"
        if self.folder is None:
            return f"{command} '{PROJECT}{suffix}'"
        pins = self.folder / "requirements" / "constraints.txt"
        if pins.exists():
            command += f" -c {pins}"
        return f"{command} -e '{self.folder}{suffix}'"


def find_project(folder: Path = SOURCE) -> ProjectRequirements:
    """Read pyproject.toml, else pip's metadata, which goes stale after an editable install."""
    file = folder / "pyproject.toml"
    if file.is_file():
        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        extras = {
            name: parse_requirements(lines)
            for name, lines in project.get("optional-dependencies", {}).items()
        }
        return ProjectRequirements(parse_requirements(project["dependencies"]), extras, folder)
    try:
        lines = parse_requirements(requires(PROJECT) or [])
    except PackageNotFoundError:
        return ProjectRequirements((), {}, None)
    base = tuple(requirement for requirement in lines if requirement.marker is None)
    by_extra: dict[str, list[Requirement]] = {}
    for requirement in lines:
        for extra in _extras_of(requirement):
            by_extra.setdefault(extra, []).append(requirement)
    extras = {name: tuple(by_extra[name]) for name in sorted(by_extra)}
    return ProjectRequirements(base, extras, None)


def parse_requirements(lines: Sequence[str]) -> tuple[Requirement, ...]:
    """Parse requirements as pip does; skip invalid ones."""
    requirements = []
    for line in lines:
        with suppress(InvalidRequirement):
            requirements.append(Requirement(line))
    return tuple(requirements)


def _extras_of(requirement: Requirement) -> list[str]:
    marker = str(requirement.marker or "")
    return [
        part.split('"')[1]
        for part in marker.split(" and ")
        if part.strip().startswith("extra ==") and '"' in part
    ]


def distribution_version(name: str) -> str | None:
    """Return a distribution's version, None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def base_findings(
    project: ProjectRequirements, find_version: Installed = distribution_version
) -> list[PreflightFinding]:
    """Return base packages that are missing or too old, and the versions of the important ones."""
    findings = []
    for requirement in project.base:
        status, text = _check_requirement(requirement, find_version)
        if status == "ok" and (tested := TESTED.get(canonicalize_name(requirement.name))):
            text += f" (tested: {', '.join(tested)})"
        if status != "ok" or canonicalize_name(requirement.name) in CORE:
            remedy = project.install("") if status != "ok" else ""
            findings.append(PreflightFinding("python", requirement.name, status, text, remedy))
    return findings


def tool_findings(
    project: ProjectRequirements,
    plugins: Mapping[str, str],
    find_version: Installed = distribution_version,
    *,
    gpus: bool = True,
) -> list[PreflightFinding]:
    """Check engines, trainers and all extras; those in ``plugins`` (setting to name) are required.

    Without ``gpus``, some packages differ.
    """
    settings = {canonicalize_name(name): key for key, name in plugins.items()}
    tools = [(area, name) for area, names in AREAS.items() for name in names]
    tool_names = {canonicalize_name(name) for _, name in tools}
    tool_names |= {
        canonicalize_name(package) for packages in TOOLS.values() for package in packages
    }
    tools += [
        ("optional", extra)
        for extra in project.extras
        if extra not in HIDDEN and canonicalize_name(extra) not in tool_names
    ]
    return [
        _check_tool(
            area,
            name,
            project,
            asked_by=settings.get(canonicalize_name(name), ""),
            find_version=find_version,
            # The extras are the same with and without a GPU.
            gpus=gpus or area == "optional",
        )
        for area, name in tools
    ]


def _check_tool(
    area: str,
    name: str,
    project: ProjectRequirements,
    asked_by: str,
    find_version: Installed,
    gpus: bool,
) -> PreflightFinding:
    """Check one plug-in's packages. ``asked_by``: the setting that names it, or empty."""
    extra = next(
        (extra for extra in project.extras if canonicalize_name(extra) == canonicalize_name(name)),
        "",
    )
    alternatives = TOOLS.get(name, ())
    versions = {package: at for package in alternatives if (at := find_version(package))}
    checks = {
        requirement.name: _check_requirement(requirement, find_version)
        for requirement in project.extras.get(extra, ())
        if canonicalize_name(requirement.name) not in map(canonicalize_name, alternatives)
    }
    problems = [f"{package} {text}" for package, (status, text) in checks.items() if status != "ok"]
    if (versions or not alternatives) and not problems:
        versions = versions or {package: text for package, (_, text) in checks.items()}
        text = ", ".join(f"{package} {at}" for package, at in versions.items())
        return PreflightFinding(area, name, "ok", text)
    text = ", ".join(problems) or f"{' or '.join(alternatives)} not installed"
    if extra:
        remedy = project.install(extra)
    else:
        remedy = f"{sys.executable} -m pip install {alternatives[0]}"
    # The CPU build is made by the Makefile of the source folder.
    if not gpus and project.folder is not None:
        remedy = WITHOUT_GPU.get(name, remedy)
    if name in EXTRA_COMMANDS:
        remedy += f" && {sys.executable} -m {EXTRA_COMMANDS[name]}"
    if asked_by:
        return PreflightFinding(area, name, "missing", f"{text}; required by {asked_by}", remedy)
    return PreflightFinding(area, name, "absent", text, remedy)


def program_findings(
    programs: Mapping[str, str], find_program: Callable[[str], str | None] = shutil.which
) -> list[PreflightFinding]:
    """Check the programs that settings name (setting to program)."""
    findings = []
    for key, program in programs.items():
        if path := find_program(program):
            findings.append(PreflightFinding("engines", key, "ok", path))
        else:
            text = f"program {program!r} not found"
            findings.append(PreflightFinding("engines", key, "missing", text, f"{key}=[…]"))
    return findings


def _check_requirement(requirement: Requirement, find_version: Installed) -> tuple[Status, str]:
    installed_version = find_version(requirement.name)
    if installed_version is None:
        return "missing", "not installed"
    specifier = requirement.specifier
    # Nightly builds of torch are prereleases.
    if specifier and not specifier.contains(installed_version, prereleases=True):
        return "missing", f"{installed_version} is installed, {specifier} is required"
    return "ok", installed_version
