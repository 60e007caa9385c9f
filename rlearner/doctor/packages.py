"""Checks which Python packages are installed and which a configuration needs, without importing
them.
"""

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
# its own requirements contradict ours
AFTER: Final[Mapping[str, str]] = {"gem": "pip install --no-deps gem-llm"}
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
        """Return the command that installs an extra; an empty name stands for the base
        requirements.
        """
        wanted = f"[{extra}]" if extra else ""
        pip = f"{sys.executable} -m pip install"
        if self.folder is None:
            return f"{pip} '{PROJECT}{wanted}'"
        pins = self.folder / "requirements" / "constraints.txt"
        return f"{pip}{f' -c {pins}' if pins.exists() else ''} -e '{self.folder}{wanted}'"


def find_project(folder: Path = SOURCE) -> ProjectRequirements:
    """Read pyproject.toml if there is one, else pip's metadata, which goes stale after an editable
    install.
    """
    file = folder / "pyproject.toml"
    if file.is_file():
        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        extras = {
            name: parsed(lines) for name, lines in project.get("optional-dependencies", {}).items()
        }
        return ProjectRequirements(parsed(project["dependencies"]), extras, folder)
    try:
        lines = parsed(requires(PROJECT) or [])
    except PackageNotFoundError:
        return ProjectRequirements((), {}, None)
    base = tuple(one for one in lines if one.marker is None)
    names = sorted({extra for one in lines for extra in _extras_of(one)})
    extras = {name: tuple(one for one in lines if name in _extras_of(one)) for name in names}
    return ProjectRequirements(base, extras, None)


def parsed(lines: Sequence[str]) -> tuple[Requirement, ...]:
    """Parse requirements as pip does; skip invalid ones."""
    found = []
    for line in lines:
        with suppress(InvalidRequirement):
            found.append(Requirement(line))
    return tuple(found)


def _extras_of(requirement: Requirement) -> list[str]:
    marker = str(requirement.marker or "")
    return [
        part.split('"')[1]
        for part in marker.split(" and ")
        if part.strip().startswith("extra ==") and '"' in part
    ]


def installed(name: str) -> str | None:
    """Return a distribution's version, None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def base_findings(
    project: ProjectRequirements, found: Installed = installed
) -> list[PreflightFinding]:
    """Return base packages that are missing or too old, and the versions of the important ones."""
    result = []
    for requirement in project.base:
        status, said = _judge(requirement, found)
        if status == "ok" and (tested := TESTED.get(canonicalize_name(requirement.name))):
            said += f" (tested: {', '.join(tested)})"
        if status != "ok" or canonicalize_name(requirement.name) in CORE:
            remedy = "" if status == "ok" else project.install("")
            result.append(PreflightFinding("python", requirement.name, status, said, remedy))
    return result


def tool_findings(
    project: ProjectRequirements,
    plugins: Mapping[str, str],
    found: Installed = installed,
    *,
    gpus: bool = True,
) -> list[PreflightFinding]:
    """Check engines, trainers and all extras; those that ``plugins`` (setting to name) names are
    required.

    Without ``gpus``, some packages differ.
    """
    wanted = {canonicalize_name(name): key for key, name in plugins.items()}
    tools = [(area, name) for area, names in AREAS.items() for name in names]
    known = {canonicalize_name(name) for _, name in tools}
    known |= {canonicalize_name(one) for packages in TOOLS.values() for one in packages}
    extras = [
        extra
        for extra in project.extras
        if extra not in HIDDEN and canonicalize_name(extra) not in known
    ]
    return [
        *(
            _tool(area, name, project, wanted.get(canonicalize_name(name), ""), found, gpus)
            for area, name in tools
        ),
        *(
            _tool("optional", extra, project, wanted.get(canonicalize_name(extra), ""), found)
            for extra in extras
        ),
    ]


def _tool(
    area: str,
    name: str,
    project: ProjectRequirements,
    asked_by: str,
    found: Installed,
    gpus: bool = True,
) -> PreflightFinding:
    """Check one plug-in's packages. ``asked_by``: the setting that names it, or empty."""
    extra = next(
        (one for one in project.extras if canonicalize_name(one) == canonicalize_name(name)), None
    )
    requirements = project.extras.get(extra, ()) if extra else ()
    alternatives = TOOLS.get(name, ())
    there = {one: at for one in alternatives if (at := found(one))}
    others = [
        one
        for one in requirements
        if canonicalize_name(one.name) not in map(canonicalize_name, alternatives)
    ]
    judged = [(one, *_judge(one, found)) for one in others]
    bad = [f"{one.name} {said}" for one, status, said in judged if status != "ok"]
    if (there or not alternatives) and not bad:
        versions = there or {one.name: said for one, _, said in judged}
        return PreflightFinding(
            area, name, "ok", ", ".join(f"{one} {at}" for one, at in versions.items())
        )
    what = ", ".join(bad) or f"{' or '.join(alternatives)} not installed"
    remedy = (
        project.install(extra) if extra else f"{sys.executable} -m pip install {alternatives[0]}"
    )
    if not gpus and project.folder is not None:
        remedy = WITHOUT_GPU.get(name, remedy)
    if name in AFTER:
        remedy += f" && {sys.executable} -m {AFTER[name]}"
    if asked_by:
        return PreflightFinding(area, name, "missing", f"{what}; required by {asked_by}", remedy)
    return PreflightFinding(area, name, "absent", what, remedy)


def program_findings(
    programs: Mapping[str, str], which: Callable[[str], str | None] = shutil.which
) -> list[PreflightFinding]:
    """Check the programs that settings name (setting to program)."""
    return [
        PreflightFinding("engines", key, "ok", path)
        if (path := which(program))
        else PreflightFinding(
            "engines", key, "missing", f"program {program!r} not found", f"{key}=[…]"
        )
        for key, program in programs.items()
    ]


def _judge(requirement: Requirement, found: Installed) -> tuple[Status, str]:
    at = found(requirement.name)
    if at is None:
        return "missing", "not installed"
    if requirement.specifier and not requirement.specifier.contains(at, prereleases=True):
        return "missing", f"{at} is installed, {requirement.specifier} is required"
    return "ok", at
