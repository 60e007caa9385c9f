"""``env: agent``: the user's program plays the episode and calls the policy over OpenAI's protocol
or Anthropic's.

    domains:
      sums:
        env: agent
        env_args:
          command: [python, my_agent.py]
          path: train.jsonl
          prompt: question
          answer: answer
        context: steps
        max_turns: 20        # calls to the policy

The program, or ``function: my_agent.py:play``, is started for each episode with OPENAI_BASE_URL,
OPENAI_API_KEY and OPENAI_MODEL in its environment, the same three of ANTHROPIC, and gets its task
as a line of JSON on stdin:
``{"task_index": 3, "split": "train", "seed": 7, "row": {...}}``. Its requests are sampled with the
run's settings and recorded. Its last line on stdout is the reward, or an object with ``reward`` and
optionally ``success``, ``response`` and ``metrics``; or its exit status is (``reward: exit``), or
reward hubs give it (``reward: none``). A crash fails the episode, which is tried again; it never
counts as a reward of zero.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

import msgspec
import numpy as np
import numpy.typing as npt
from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from broker.errors import ConfigError, DataError
from broker.settings.config import DomainSection, Section
from broker.settings.secret import SecretRef
from envhub.envs.base import Environment, Split
from rlearner_text.rows.columns import digest_row
from rlearner_workers.start import BOOT

LAUNCHER: Final = "envhub.agents.call"
Source = Literal["result", "exit", "none"]

# as a command, the hub's interpreter, whether it is on PATH or not
PYTHON: Final = "python"


class AgentArgs(Section):
    """``env_args`` of ``agent``."""

    # program and arguments, `python` being the hub's own; or:
    command: list[str] = Field(default_factory=list)
    # package.module:name or file.py:name, called with the task in its own process; may be async
    function: str = ""
    # the last line on stdout; exit: 1 for exit status 0, 0 for 1; none: reward hubs give it
    reward: Source = "result"
    path: str | None = None  # JSONL; each row is a task
    prompt: str | None = None  # column that reward hubs see as the question
    answer: str | None = None  # column that they see as the reference
    eval_path: str | None = None  # a file for evaluation; None: the share below
    # of the rows of ``path``, taken from its end
    eval_share: Annotated[float, Field(ge=0, lt=1)] = 0.05
    num_tasks: PositiveInt | None = None  # if there is no file; None: endless
    shuffle_seed: NonNegativeInt = 0
    # added to the program's environment
    env: dict[str, str | SecretRef] = Field(default_factory=dict)
    cwd: str | None = None  # folder to run in; None: the hub's

    @model_validator(mode="after")
    def _one(self) -> Self:
        if bool(self.command) == bool(self.function):
            raise ValueError("give one of command and function")
        if self.path is None and (self.prompt or self.answer or self.eval_path):
            raise ValueError("prompt, answer and eval_path need path")
        return self


class AgentEnvironment(Environment):
    """The class of ``env: agent``; it has no steps, as ``envhub.agents`` runs its program."""

    Args = AgentArgs
    isolation = "none"

    args: AgentArgs

    @classmethod
    def check(cls, args: AgentArgs) -> None:
        program, *arguments = args.command or [PYTHON]
        if program != PYTHON and shutil.which(program, path=plain_env(args).get("PATH")) is None:
            raise ConfigError(
                "command", args.command, f"a program that is there; {program!r} is not"
            )
        if program == PYTHON and arguments and arguments[0].endswith(".py"):
            script = arguments[0]
            if not Path(args.cwd or "", script).is_file():
                raise ConfigError("command", args.command, f"there is no file {script}")
        file = args.function.rpartition(":")[0]
        if args.function and not file:
            raise ConfigError(
                "function", args.function, "write 'package.module:name' or 'file.py:name'"
            )
        if file.endswith(".py") and not Path(file).is_file():
            raise ConfigError("function", args.function, f"there is no file {file}")
        if args.cwd is not None and not Path(args.cwd).is_dir():
            raise ConfigError("cwd", args.cwd, "there is no such folder")
        # the file may have changed since the last check
        _read_file.cache_clear()
        if args.path is not None and not rows(args, "train"):
            raise ConfigError(
                "eval_share", args.eval_share, "a smaller share: it leaves no row for training"
            )
        if args.eval_path is not None:
            rows(args, "eval")

    @classmethod
    def folders(cls, args: AgentArgs) -> tuple[list[str], list[str]]:
        paths = []
        if args.command:
            program = shutil.which(args.command[0], path=plain_env(args).get("PATH"))
            if program:
                paths.append(program)
        for argument in args.command[1:]:
            if Path(args.cwd or "", argument).is_file():
                paths.append(os.path.join(args.cwd or "", argument))
        file = args.function.rpartition(":")[0]
        if file.endswith(".py"):
            paths.append(file)
        if args.cwd:
            paths.append(args.cwd)
        return paths, []

    @classmethod
    def data_files(cls, args: AgentArgs) -> list[str]:
        return [file for file in (args.path, args.eval_path) if file is not None]

    @classmethod
    def num_tasks(cls, args: AgentArgs, split: Split) -> int | None:
        if args.path is None:
            return args.num_tasks
        return len(rows(args, split))

    @classmethod
    def task_keys(cls, args: AgentArgs) -> list[bytes] | None:
        if args.path is None:
            return None
        num_rows = len(rows(args, "train"))
        in_order = (row(args, task, "train") for task in range(num_rows))
        return [digest_row(dict(each or {}))[:8] for each in in_order]

    @classmethod
    def row_digests(cls, args: AgentArgs) -> dict[str, list[bytes]]:
        if args.path is None:
            return {}
        digests: dict[str, list[bytes]] = {}
        for path, split_rows in (
            (args.path, rows(args, "train")),
            (args.eval_path or args.path, rows(args, "eval")),
        ):
            digests.setdefault(path, []).extend(digest_row(each)[:8] for each in split_rows)
        return digests


def plain_env(args: AgentArgs) -> dict[str, str]:
    """Return the variables added to the program's environment, without secrets."""
    return {name: value for name, value in args.env.items() if isinstance(value, str)}


def whole_env(args: AgentArgs) -> dict[str, str]:
    """Return the variables added to the program's environment.

    Raises:
        UserError: if a secret is missing or not usable.
    """
    secrets = {name: ref for name, ref in args.env.items() if not isinstance(ref, str)}
    return plain_env(args) | {
        name: ref.require(f"env_args.env.{name}") for name, ref in secrets.items()
    }


def check_section(name: str, section: DomainSection, args: Section) -> None:
    """Check what an agent needs of its domain.

    Raises:
        ConfigError: names the key.
    """
    if section.context != "steps":
        allowed = (
            "steps with env agent: a call that does not continue an earlier one begins another "
            "sample"
        )
        raise ConfigError(f"domains.{name}.context", section.context, allowed)
    if section.isolation not in (None, "none", "sandbox"):
        allowed = "none or sandbox with env agent: its program is a process of its own"
        raise ConfigError(f"domains.{name}.isolation", section.isolation, allowed)
    if section.isolation == "sandbox" and not section.network:
        allowed = (
            "true with env agent and isolation sandbox: "
            "the agent reaches the policy over the host's network"
        )
        raise ConfigError(f"domains.{name}.network", section.network, allowed)
    if isinstance(args, AgentArgs) and args.reward == "none" and not section.rewards:
        allowed = "at least one with env_args.reward none: the agent gives no reward"
        raise ConfigError(f"domains.{name}.rewards", [], allowed)


def command(args: AgentArgs) -> list[str]:
    """Return the program and its arguments."""
    if args.command:
        program, *arguments = args.command
        return [sys.executable if program == PYTHON else program, *arguments]
    path = "\n".join(folder or os.getcwd() for folder in sys.path)
    return [sys.executable, "-P", "-c", BOOT, f"{LAUNCHER}:", args.function, path]


def row(args: AgentArgs, task_index: int, split: Split) -> Mapping[str, Any] | None:
    """Return the row of a task, None if there is no file; training shuffles them every epoch."""
    if args.path is None:
        return None
    split_rows = rows(args, split)
    epoch, position = divmod(task_index, len(split_rows))
    if split == "train":
        position = int(_epoch_order(len(split_rows), args.shuffle_seed, epoch)[position])
    return split_rows[position]


def text_of(args: AgentArgs, of: Mapping[str, Any] | None, column: str | None) -> str:
    """Return a column as text; empty if no column is named."""
    value = "" if of is None or column is None else of[column]
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def rows(args: AgentArgs, split: Split) -> tuple[dict[str, Any], ...]:
    """Return the rows of a split.

    Raises:
        ConfigError: if the file does not exist or is empty.
        DataError: if a row is malformed.
    """
    columns = tuple(column for column in (args.prompt, args.answer) if column is not None)
    if split == "eval" and args.eval_path is not None:
        return _read_file(args.eval_path, columns, "eval_path")
    assert args.path is not None, "there is no file"
    file_rows = _read_file(args.path, columns, "path")
    if args.eval_path is not None:
        return file_rows
    num_held_out = max(round(len(file_rows) * args.eval_share), int(args.eval_share > 0))
    num_training = len(file_rows) - num_held_out
    return file_rows[num_training:] if split == "eval" else file_rows[:num_training]


@lru_cache(maxsize=8)
def _read_file(path: str, columns: tuple[str, ...], key: str) -> tuple[dict[str, Any], ...]:
    if not Path(path).is_file():
        raise ConfigError(key, path, "there is no such file")
    decoder = msgspec.json.Decoder(dict[str, Any])
    records = []
    for line, data in enumerate(Path(path).read_bytes().split(b"\n"), start=1):
        if not data.strip():
            continue
        try:
            records.append(decoder.decode(data))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise DataError(path, line, f"not a JSON object: {error}") from None
        for column in columns:
            if column not in records[-1]:
                raise DataError(
                    path,
                    line,
                    f"no column {column!r}; it has {', '.join(sorted(records[-1])) or 'none'}",
                )
    if not records:
        raise ConfigError(key, path, "the file holds no rows")
    return tuple(records)


@lru_cache(maxsize=4)
def _epoch_order(num_rows: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    return np.random.default_rng([seed, epoch]).permutation(num_rows)
