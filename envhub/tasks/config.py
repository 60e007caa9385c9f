"""``task.toml`` of schema 1.4: every table and key that Harbor's own model has.

Keys that cannot be honoured are read here, too, and refused by name in ``envhub.tasks.demands``.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from broker.settings.config import Section

NetworkMode = Literal["no-network", "public", "allowlist"]
User = str | int | None
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([KMG])", re.IGNORECASE)
_MIB_OF: Final = {"K": 1 / 1024, "M": 1.0, "G": 1024.0}
# where the agent may leave files for the verifier, as Harbor's convention has it
ARTIFACTS: Final = "/logs/artifacts"


class AuthorTable(Section):
    """``[[task.authors]]``."""

    name: str
    email: str | None = None


class PackageTable(Section):
    """``[task]``: who publishes the task."""

    name: Annotated[str, Field(min_length=1)]
    version: str | None = None
    description: str = ""
    authors: list[AuthorTable] = Field(default_factory=list)
    keywords: list[str] = Field(default_factory=list)


class HealthcheckTable(Section):
    """``[environment.healthcheck]``: a command that must succeed before the agent begins."""

    command: Annotated[str, Field(min_length=1)]
    interval_sec: NonNegativeFloat = 5.0
    timeout_sec: PositiveFloat = 30.0
    start_period_sec: NonNegativeFloat = 0.0
    start_interval_sec: NonNegativeFloat = 5.0
    retries: PositiveInt = 3


class TpuTable(Section):
    """``[environment.tpu]``."""

    type: str
    topology: str


class McpServerTable(Section):
    """``[[environment.mcp_servers]]``."""

    name: str
    transport: Literal["stdio", "sse", "streamable-http", "http"] = "sse"
    url: str | None = None
    command: str | None = None
    args: list[str] = Field(default_factory=list)
    headers: dict[str, str] = Field(default_factory=dict)


class EnvironmentTable(Section):
    """``[environment]``, and ``[verifier.environment]``."""

    network_mode: NetworkMode | None = None
    allowed_hosts: list[str] | None = None
    allow_internet: bool | None = None
    build_timeout_sec: PositiveFloat = 600.0
    docker_image: str | None = None
    os: str = "linux"
    cpus: PositiveFloat | None = None
    memory_mb: PositiveInt | None = None
    storage_mb: PositiveInt | None = None
    gpus: int | None = None
    gpu_types: list[str] | None = None
    tpu: TpuTable | None = None
    mcp_servers: list[McpServerTable] = Field(default_factory=list)
    env: dict[str, str] = Field(default_factory=dict)
    skills_dir: str | None = None
    healthcheck: HealthcheckTable | None = None
    workdir: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _from_older_keys(cls, data: Any) -> Any:
        """Read ``memory = "2G"`` and ``storage``, as schema 1.0 has them."""
        if not isinstance(data, dict):
            return data
        fields = dict(data)
        for name in ("memory", "storage"):
            if name not in fields:
                continue
            size = _SIZE.fullmatch(str(fields.pop(name)).strip())
            if size is None:
                raise ValueError(f"{name}: write a size such as 512M or 2G")
            fields.setdefault(f"{name}_mb", int(float(size[1]) * _MIB_OF[size[2].upper()]))
        return fields

    @property
    def network(self) -> NetworkMode | None:
        """The declared mode; None if the task says nothing."""
        if self.network_mode is not None or self.allow_internet is None:
            return self.network_mode
        return "public" if self.allow_internet else "no-network"


class CollectTable(Section):
    """``[[verifier.collect]]``: a command in the agent's sandbox after the agent has ended."""

    command: Annotated[str, Field(min_length=1)]
    service: str = "main"
    timeout_sec: PositiveFloat = 60.0
    user: User = None


class VerifierTable(Section):
    """``[verifier]``."""

    network_mode: NetworkMode | None = None
    allowed_hosts: list[str] | None = None
    timeout_sec: PositiveFloat = 600.0
    env: dict[str, str] = Field(default_factory=dict)
    user: User = None
    environment_mode: Literal["shared", "separate"] | None = None
    environment: EnvironmentTable | None = None
    collect: list[CollectTable] = Field(default_factory=list)

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if self.environment_mode == "shared" and self.environment is not None:
            raise ValueError("environment_mode is shared, so there is no environment of its own")
        return self

    @property
    def mode(self) -> Literal["shared", "separate"] | None:
        """The declared mode; None if the task says nothing."""
        if self.environment_mode is None and self.environment is not None:
            return "separate"
        return self.environment_mode


class AgentTable(Section):
    """``[agent]``."""

    network_mode: NetworkMode | None = None
    allowed_hosts: list[str] | None = None
    timeout_sec: PositiveFloat | None = None
    user: User = None


class SolutionTable(Section):
    """``[solution]``."""

    env: dict[str, str] = Field(default_factory=dict)


class ArtifactTable(Section):
    """An entry of ``artifacts``: what the verifier gets of the agent's sandbox."""

    source: Annotated[str, Field(min_length=1)]
    destination: str | None = None
    exclude: list[str] = Field(default_factory=list)
    service: str | None = None

    @model_validator(mode="after")
    def _stays_inside(self) -> Self:
        for path in (self.source, self.destination or ""):
            if ".." in PurePosixPath(path).parts:
                raise ValueError(f"{path!r} leaves its folder")
        return self


def _as_tables(entries: Any) -> Any:
    """Return artifacts that are written as paths as tables."""
    if not isinstance(entries, list):
        return entries
    return [{"source": entry} if isinstance(entry, str) else entry for entry in entries]


Artifacts = Annotated[list[ArtifactTable], BeforeValidator(_as_tables)]


class StepTable(Section):
    """``[[steps]]``: a task of several steps has a folder ``steps/<name>`` for each."""

    name: str
    agent: AgentTable = AgentTable()
    verifier: VerifierTable = VerifierTable()
    min_reward: float | dict[str, float] | None = None
    healthcheck: HealthcheckTable | None = None
    artifacts: Artifacts = Field(default_factory=list)

    @model_validator(mode="after")
    def _names_a_folder(self) -> Self:
        if not re.fullmatch(r"[^\x00-\x1f<>:\"/\\|?*]{1,255}", self.name) or not self.name.strip(
            ". "
        ):
            raise ValueError(f"{self.name!r} cannot be the name of a folder")
        return self


class TaskTable(Section):
    """The whole of ``task.toml``."""

    schema_version: str = "1.4"
    task: PackageTable | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)
    verifier: VerifierTable = VerifierTable()
    agent: AgentTable = AgentTable()
    environment: EnvironmentTable = EnvironmentTable()
    solution: SolutionTable = SolutionTable()
    source: str | None = None
    multi_step_reward_strategy: Literal["mean", "final"] | None = None
    steps: list[StepTable] | None = None
    artifacts: Artifacts = Field(default_factory=list)

    @model_validator(mode="before")
    @classmethod
    def _from_older_keys(cls, data: Any) -> Any:
        """Read ``version``, as schema 1.0 has it."""
        if not isinstance(data, dict) or "version" not in data:
            return data
        fields = dict(data)
        version = fields.pop("version")
        return {"schema_version": version, **fields}

    @model_validator(mode="after")
    def _has_distinct_steps(self) -> Self:
        names = [unicodedata.normalize("NFC", step.name).casefold() for step in self.steps or ()]
        if len(set(names)) < len(names):
            raise ValueError("two steps have the same name")
        return self


def artifact_entries(*lists: list[ArtifactTable]) -> list[ArtifactTable]:
    """Return the artifacts of a task and a step, with the folder of the convention first."""
    entries = [entry for entries in lists for entry in entries]
    if not any(entry.source.rstrip("/") == ARTIFACTS for entry in entries):
        entries.insert(0, ArtifactTable(source=ARTIFACTS))
    return entries


def resolve_variables(values: Mapping[str, str], given: Mapping[str, str]) -> dict[str, str]:
    """Return variables with ``${NAME}`` and ``${NAME:-default}`` replaced.

    Args:
        given: values by name; the hub's own environment is never read, because the policy can.

    Raises:
        KeyError: names the first variable that has neither a value nor a default.
    """
    resolved = {}
    for name, value in values.items():
        match = re.fullmatch(r"\$\{(\w+)(?::-(.*))?\}", value, re.DOTALL)
        if match is None:
            resolved[name] = value
        elif match[1] in given:
            resolved[name] = given[match[1]]
        elif match[2] is not None:
            resolved[name] = match[2]
        else:
            raise KeyError(match[1])
    return resolved
