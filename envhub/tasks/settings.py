"""``env_args`` of ``env: task``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from broker.settings.config import DataPath, PluginArguments, Section
from broker.settings.secret import SecretRef


class TaskArgs(Section):
    """``env_args`` of ``task``."""

    harmless = None  # it runs what the owner of the policy and of the tasks writes

    # a task folder, a folder of them, or a registry file that names them
    path: DataPath
    dataset: str = ""  # of a registry file: name or name@version
    tasks: tuple[str, ...] = ()  # patterns of names, such as find-*; empty: all
    eval_path: DataPath | None = None  # tasks for evaluation; None: the share below
    # of the tasks of ``path``, taken from its end
    eval_share: Annotated[float, Field(ge=0, lt=1)] = 0.05
    shuffle_seed: NonNegativeInt = 0
    # file systems by the name of an image (``*`` for all others) or of a task: a folder, the
    # digest of built layers, or ``host``: this host's own system, read-only
    images: dict[str, str] = Field(default_factory=dict)
    provider: str = "namespace"  # of sandboxes
    provider_args: PluginArguments = Field(default_factory=dict)
    warm: NonNegativeInt = 0  # sandboxes in reserve of each image that was asked for lately
    # separate: tests run in a fresh sandbox that gets the working folder and the artifacts;
    # shared: in the files that the policy has left, where it can make them pass
    verifier: Literal["separate", "shared"] = "separate"
    network: Literal["none", "host"] = "none"  # of agent and tests
    # values of ``${NAME}`` in the tasks' variables
    env: dict[str, str | SecretRef] = Field(default_factory=dict)
    # calls: tools of the chat template; text: <shell>…</shell>, <submit></submit>
    form: Literal["calls", "text"] = "calls"
    max_steps: PositiveInt = 16  # turns of the policy in all, after which its work is graded
    command_timeout_s: PositiveFloat = 20.0  # of one command of the policy
    output_chars: Annotated[int, Field(ge=64)] = 4000  # of a command's output that are shown
    # of all commands of a step together, where the task says nothing
    agent_timeout_s: PositiveFloat = 600.0
    memory_mib: Annotated[int, Field(ge=32)] = 2048  # where the task says nothing, as below
    cpus: PositiveFloat = 1.0
    disk_mib: PositiveInt = 1024
    processes: PositiveInt = 256
    # of the working folder and the artifacts that the tests get
    max_artifacts_mib: PositiveInt = 256
    reward: str = "reward"  # key of reward.json to train on
    format_penalty: Annotated[float, Field(ge=0)] = 0.0  # for a turn that calls no tool
    # a program that solves the task instead of the policy's turns; {instruction} is replaced
    agent: tuple[str, ...] = ()
    # folders or files of this host by where the agent finds them in its sandbox
    agent_files: dict[str, str] = Field(default_factory=dict)
    # variables of that program
    agent_env: dict[str, str | SecretRef] = Field(default_factory=dict)


def plain_values(values: dict[str, str | SecretRef], key: str) -> dict[str, str]:
    """Return variables with their secrets.

    Raises:
        UserError: if a secret is missing or not usable.
    """
    return {
        name: value if isinstance(value, str) else value.require(f"env_args.{key}.{name}")
        for name, value in values.items()
    }
