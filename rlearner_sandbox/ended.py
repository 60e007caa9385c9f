"""A program to run in the sandbox, and its result."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Literal

# Exit codes of our own, see inside.py and remote.py.
OUT_OF_MEMORY = 86
NO_PYTHON = 87
PROGRAM_GONE = 88
OUT_OF_TIME = 128 + signal.SIGXCPU
KilledFor = Literal["", "time", "memory", "output"]


@dataclass(frozen=True)
class ProgramChecks:
    """Tests of a loaded program; ``first`` is code before all tests, or the name of a function.

    Code runs in a separate process, where stand-ins replace the program's functions; see
    ``rlearner_sandbox.remote``.
    """

    first: str
    cases: tuple[str, ...]


@dataclass(frozen=True)
class ProgramEnd:
    """How a program ended.

    Attributes:
        exit_code: 128 and more: the number of the signal that killed it.
        killed_for: the limit for which we killed it.
        compiled: whether it is Python at all.
        answers: what each test answered in JSON; those that failed or were not reached are missing.
        seconds: wall time from its first instruction on.
    """

    exit_code: int
    killed_for: KilledFor
    compiled: bool
    answers: dict[int, str]
    stdout: bytes
    stderr: bytes
    seconds: float

    @property
    def timed_out(self) -> bool:
        """Whether it exceeded the wall or processor time limit."""
        return self.killed_for == "time" or (not self.killed_for and self.exit_code == OUT_OF_TIME)

    @property
    def out_of_memory(self) -> bool:
        """Whether it exceeded the memory limit."""
        killed = not self.killed_for and self.exit_code in (OUT_OF_MEMORY, 128 + signal.SIGKILL)
        return self.killed_for == "memory" or killed
