"""Reads a Dockerfile that needs no builder: one stage whose steps run in a sandbox at its start.

``FROM`` names an image that the run maps to a root file system. ``RUN`` has no network, so a step
that plainly needs one is refused here; ``rlearner tasks build`` builds such images beforehand.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final, Literal

from broker.errors import DataError

BUILD: Final = "build the image and name its layers in env_args.images"
# they say what a container runs, ports and labels: nothing of a task's files
_IGNORED: Final = frozenset(
    {"LABEL", "EXPOSE", "STOPSIGNAL", "CMD", "ENTRYPOINT", "MAINTAINER", "VOLUME", "HEALTHCHECK"}
)
_NETWORK: Final = re.compile(
    r"\b(apt-get|apt|yum|dnf|apk|pip3?|uv|uvx|npm|pnpm|yarn|cargo|gem|go)\s+(-\S+\s+)*"
    r"(update|install|add|get|fetch|sync)\b|\b(curl|wget)\s|\bgit\s+(clone|fetch|pull)\b"
)
_VARIABLE: Final = re.compile(r"\$(?:\{(\w+)(?::-([^}]*))?\}|(\w+))")


@dataclass(frozen=True)
class BuildStep:
    """A step that changes files: a command to run, or paths to copy from the context."""

    kind: Literal["run", "copy"]
    line: int
    command: str = ""
    sources: tuple[str, ...] = ()
    target: str = ""
    workdir: str = "/"


@dataclass(frozen=True)
class ImagePlan:
    """What makes a task's file system.

    Attributes:
        base: name of the image to begin with.
        context: folder that is copied from.
        workdir: folder of commands; empty if none is named.
        user: of commands; None if none is named.
        file: the Dockerfile, for errors; None: the base is used as it is.
        has_loose_files: whether the context is copied to the working folder.
    """

    base: str
    context: Path
    steps: tuple[BuildStep, ...] = ()
    workdir: str = ""
    env: Mapping[str, str] | None = None
    user: str | None = None
    file: Path | None = None
    has_loose_files: bool = False


def read_dockerfile(file: Path) -> ImagePlan:
    """Return what a Dockerfile says.

    Raises:
        DataError: names the line of an instruction that needs a builder or the network.
    """
    base = workdir = ""
    user: str | None = None
    env: dict[str, str] = {}
    arguments: dict[str, str] = {}
    steps: list[BuildStep] = []
    for line, name, rest in _iter_instructions(file):
        values = {**arguments, **env}
        if name == "FROM":
            if base:
                raise DataError(str(file), line, f"a second stage; {BUILD}")
            base = _expand(rest, values).split()[0]
        elif name == "ARG":
            argument, _, default = rest.partition("=")
            arguments[argument.strip()] = _expand(default.strip().strip("\"'"), values)
        elif name == "ENV":
            env |= _read_pairs(file, line, rest, values)
        elif name == "WORKDIR":
            workdir = str(PurePosixPath(workdir or "/", _expand(rest.strip("\"'"), values)))
        elif name == "USER":
            user = _expand(rest, values).partition(":")[0]
        elif name == "RUN":
            steps.append(BuildStep("run", line, _read_run(file, line, rest), workdir=workdir))
        elif name in ("COPY", "ADD"):
            steps.append(_read_copy(file, line, _expand(rest, values), workdir or "/"))
        elif name not in _IGNORED:
            raise DataError(str(file), line, f"{name} is not supported; {BUILD}")
    if not base:
        raise DataError(str(file), 1, "there is no FROM")
    return ImagePlan(
        base, file.parent, tuple(steps), workdir=workdir, env=env, user=user, file=file
    )


def _iter_instructions(file: Path) -> Iterator[tuple[int, str, str]]:
    """Yield line, name and arguments of each instruction; continued lines are joined."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(str(file), 1, f"cannot be read: {error}") from None
    text = ""
    first = 0
    for number, line in enumerate(lines, start=1):
        if line.lstrip().startswith("#") or (not line.strip() and not text):
            continue
        first = first or number
        if line.rstrip().endswith("\\"):
            text += line.rstrip()[:-1] + " "
            continue
        name, _, rest = (text + line).strip().partition(" ")
        if name.upper() in ("RUN", "COPY") and re.search(r"<<-?['\"]?\w", rest):
            raise DataError(str(file), first, f"a here-document is not supported; {BUILD}")
        yield first, name.upper(), rest.strip()
        text = ""
        first = 0


def _expand(text: str, values: Mapping[str, str]) -> str:
    return _VARIABLE.sub(
        lambda match: values.get(match[1] or match[3], match[2] or ""),
        text,
    )


def _read_pairs(file: Path, line: int, text: str, values: Mapping[str, str]) -> dict[str, str]:
    try:
        words = shlex.split(_expand(text, values))
    except ValueError as error:
        raise DataError(str(file), line, f"ENV: {error}") from None
    if words and "=" not in words[0]:
        return {words[0]: " ".join(words[1:])}
    return {name: value for name, _, value in (word.partition("=") for word in words)}


def _read_run(file: Path, line: int, text: str) -> str:
    if text.startswith("--"):
        raise DataError(str(file), line, f"RUN {text.split()[0]} is not supported; {BUILD}")
    command = text
    if text.startswith("["):
        try:
            command = shlex.join(json.loads(text))
        except (ValueError, TypeError):
            raise DataError(str(file), line, "RUN: not a JSON list of words") from None
    tool = _NETWORK.search(command)
    if tool is not None:
        needed = tool[0].strip().split()[0]
        raise DataError(str(file), line, f"RUN {needed} needs the network, which is off; {BUILD}")
    return command


def _read_copy(file: Path, line: int, text: str, workdir: str) -> BuildStep:
    words = text.split()
    if text.startswith("["):
        try:
            words = [str(word) for word in json.loads(text)]
        except ValueError:
            raise DataError(str(file), line, "COPY: not a JSON list of words") from None
    paths = [word for word in words if not word.startswith(("--chown", "--chmod"))]
    for word in paths:
        if word.startswith(("--", "http://", "https://", "git@")):
            raise DataError(str(file), line, f"COPY {word} is not supported; {BUILD}")
    if len(paths) < 2:
        raise DataError(str(file), line, "COPY needs a source and a target")
    sources = tuple(paths[:-1])
    root = file.parent.resolve()
    for source in sources:
        matches = list(root.glob(source.lstrip("/"))) if source not in (".", "./") else [root]
        if not matches:
            raise DataError(str(file), line, f"COPY: there is no {source} in {file.parent}")
        if any(not match.resolve().is_relative_to(root) for match in matches):
            raise DataError(str(file), line, f"COPY: {source} is outside {file.parent}")
    target = paths[-1]
    is_folder = target.endswith("/") or target in (".", "..") or len(sources) > 1
    target = str(PurePosixPath(workdir, target)) + "/" * is_folder
    return BuildStep("copy", line, sources=sources, target=target, workdir=workdir)
