"""What ``rlearner check`` and ``rlearner plan`` say about a model before anything starts."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import yaml

from rlearner import cli

COMMANDS: Final[Mapping[str, tuple[str, ...]]] = {  # the cells that a command speaks about
    "run": ("engine", "weights", "padded", "resume", "export"),
    "run with lora": ("lora", "engine", "weights", "padded", "resume", "export"),
    "sft": ("padded", "resume", "export"),
    "sft packed": ("packed", "padded", "resume", "export"),
    "plan": ("plan", "engine", "weights", "padded", "resume", "export"),
}
REFUSED: Final = 2  # exit code


class Answer(msgspec.Struct, frozen=True):
    """Exit code and last line of one command."""

    code: int
    line: str


def ask(command: str, folder: Path) -> Answer:
    """Run a command on a configuration with the model in ``folder``."""
    work = folder.parent / "checked"
    work.mkdir(exist_ok=True)
    config = _offline(folder, work, command)
    arguments = ["check"]
    if command in ("run", "run with lora", "plan"):
        config = _run(folder, work, command)
        arguments = ["check", "--no-trial"]
    if command == "plan":
        arguments = ["plan", "--gpus", "2", "--gpu-memory", "80"]
    file = work / f"{command.replace(' ', '-')}.yaml"
    file.write_text(yaml.safe_dump(config))
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
        try:
            code = cli.main([arguments[0], str(file), *arguments[1:]])
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
    lines = [line for line in errors.getvalue().splitlines() if line.strip()]
    return Answer(int(code or 0), lines[-1] if lines and code else "")


def _run(folder: Path, work: Path, command: str) -> dict[str, Any]:
    lake = {"env": "frozenlake", "max_context_tokens": 40, "sampling": {"max_tokens": 16}}
    train: dict[str, Any] = {"steps": 2, "groups_per_step": 2, "device": "cpu"}
    train |= {"lora": {}} if command == "run with lora" else {}
    return {
        "run": {"name": "checked", "dir": str(work / "runs")},
        "model": {"path": str(folder)},
        "domains": {"lake": lake},
        "train": train,
        "rollout": {"max_context_tokens": 40},
    }


def _offline(folder: Path, work: Path, command: str) -> dict[str, Any]:
    rows = work / "rows.jsonl"
    turns = [{"role": "user", "content": "2+2"}, {"role": "assistant", "content": "4"}]
    rows.write_text((json.dumps({"messages": turns}) + "\n") * 20)
    train = {
        "steps": 2,
        "batch_size": 2,
        "packing": "packed" if command == "sft packed" else "padded",
    }
    run = {"name": "checked", "dir": str(work / "runs")}
    return {
        "run": run,
        "model": {"path": str(folder)},
        "data": {"train": str(rows)},
        "train": train,
    }
