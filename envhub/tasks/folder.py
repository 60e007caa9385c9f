"""Reads one task folder: its configuration, instructions, tests and solution."""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Final

from broker.errors import ConfigError, DataError
from broker.settings.sections import parse
from envhub.tasks.config import StepTable, TaskTable

CONFIG: Final = "task.toml"
INSTRUCTION: Final = "instruction.md"
TEST: Final = "test.sh"
# marks of benchmark data at the top of an instruction, which agents are not shown
_CANARY: Final = re.compile(r"(<!--.*canary.*-->|#.*canary.*)", re.IGNORECASE)
# what else a task may have is not read, and would silently change its meaning
_UNREAD: Final = {
    "trajectory.json": "a conversation before the first instruction is not continued",
    ".harborignore": "ignore rules are not read; move what is not needed out of the task",
    "tests/.harborignore": "ignore rules are not read; move what is not needed out of the task",
    "solution/.harborignore": "ignore rules are not read",
    "environment/docker-compose.yaml": "there is one sandbox and no compose file",
}


@dataclass(frozen=True)
class TaskStep:
    """What the agent is asked at once, and how that is graded.

    Attributes:
        name: of a step of a task of several; empty if the task has one.
        tests: folders that are copied to ``/tests``, the later over the earlier.
        setup: files that are copied to the working folder before the agent begins.
        solution: folder with ``solve.sh``, if the task has it.
    """

    name: str
    instruction: str
    tests: tuple[Path, ...]
    solution: Path
    setup: Path | None
    table: StepTable


@dataclass(frozen=True)
class Task:
    """A task folder that has been read.

    Attributes:
        folder: its absolute path.
        table: its ``task.toml``.
        steps: at least one.
    """

    folder: Path
    table: TaskTable
    steps: tuple[TaskStep, ...]

    @property
    def name(self) -> str:
        """Its name as a package, else that of its folder."""
        return self.table.task.name if self.table.task else self.folder.name

    @cached_property
    def digest(self) -> str:
        """SHA-256 of all names and contents below the folder."""
        digest = hashlib.sha256()
        for path in sorted(iter_files(self.folder)):
            digest.update(f"{path.relative_to(self.folder).as_posix()}\0".encode())
            digest.update(hashlib.sha256(path.read_bytes()).digest())
        return digest.hexdigest()


def iter_files(folder: Path) -> Iterator[Path]:
    """Yield the regular files below a folder; links are not followed."""
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            yield path


@lru_cache(maxsize=1 << 14)
def read_task(folder: Path) -> Task:
    """Read a task folder; reads it again only after ``read_task.cache_clear()``.

    Raises:
        DataError: if a key of ``task.toml`` is not allowed, or a file is missing or not readable.
    """
    table = _read_table(folder / CONFIG)
    for name, problem in _UNREAD.items():
        if (folder / name).exists():
            raise DataError(str(folder / name), 1, problem)
    if table.steps:
        steps = tuple(_read_step(folder, step) for step in table.steps)
        return Task(folder.absolute(), table, steps)
    only_step = StepTable(
        name="task",
        agent=table.agent,
        verifier=table.verifier,
    )
    instruction = _read_instruction(folder / INSTRUCTION)
    tests = folder / "tests"
    _require_test(folder, (tests,))
    step = TaskStep(
        "", instruction, (tests,), solution=folder / "solution", setup=None, table=only_step
    )
    return Task(folder.absolute(), table, (step,))


def _read_table(path: Path) -> TaskTable:
    try:
        fields = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(str(path), 1, error.strerror or "cannot be read") from None
    except UnicodeDecodeError:
        raise DataError(str(path), 1, "not UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        line = re.search(r"at line (\d+)", str(error))
        raise DataError(str(path), int(line[1]) if line else 1, f"not TOML: {error}") from None
    # free text that nothing reads may hold dates
    fields.pop("metadata", None)
    try:
        return parse("task", fields, TaskTable)
    except ConfigError as error:
        key = error.key.removeprefix("task.")
        allowed = error.allowed.replace("'task.", "'")
        raise refused_key(path, key, error.value, allowed) from None


def refused_key(path: Path, key: str, value: object, allowed: str) -> DataError:
    """Return the error of a key of a ``task.toml``, with its line."""
    last = next((part for part in reversed(key.split(".")) if not part.isdigit()), key)
    pattern = re.compile(rf"\s*(\[.*)?{re.escape(last)}\b")
    lines = path.read_text(encoding="utf-8").splitlines()
    line = next((number for number, text in enumerate(lines, 1) if pattern.match(text)), 1)
    return DataError(str(path), line, f"{key}: {value!r:.100} is not allowed; {allowed}")


def _read_step(folder: Path, table: StepTable) -> TaskStep:
    own = folder / "steps" / table.name
    if (own / "trajectory.json").exists():
        raise DataError(str(own / "trajectory.json"), 1, _UNREAD["trajectory.json"])
    tests = tuple(path for path in (folder / "tests", own / "tests") if path.is_dir())
    _require_test(own, tests)
    return TaskStep(
        table.name,
        _read_instruction(own / INSTRUCTION),
        tests,
        solution=own / "solution",
        setup=own / "workdir" if (own / "workdir").is_dir() else None,
        table=table,
    )


def _require_test(folder: Path, tests: tuple[Path, ...]) -> None:
    if not any((path / TEST).is_file() for path in tests):
        raise DataError(
            str(folder / "tests" / TEST), 1, "there is no such file: the task has no tests"
        )


def _read_instruction(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(str(path), 1, error.strerror or "cannot be read") from None
    except UnicodeDecodeError:
        raise DataError(str(path), 1, "not UTF-8") from None
    lines = text.split("\n")
    while lines and _CANARY.fullmatch(lines[0].strip()):
        lines.pop(0)
    instruction = "\n".join(lines).strip()
    if not instruction:
        raise DataError(str(path), 1, "empty: the agent is told nothing")
    return instruction
