"""Runs Python programs that nobody trusts, under bubblewrap (Linux).

Such a program has: a process namespace, a network, an IPC and a mount namespace of its own; a read-only root with the C
library and Python in it and nothing else; a private ``/proc``; a ``/tmp`` of bounded size; an empty environment; an
unprivileged uid without capabilities; a filter on system calls; limits on time, memory, processes, files and output. It
ends when the process that started it does.

Tests of a program's functions (``mode="asserts"``) run in a second sandbox, where stand-ins pass plain data to the
program and back (``rlearner_sandbox.remote``): what a program does to its own process does not reach them.

What no process here bounds: the kernel's own memory for very many empty files, and processor time of all processes of a
program together beyond ``wall_s`` times the processors.
"""

from __future__ import annotations

from rlearner_sandbox.command import SandboxLimits
from rlearner_sandbox.ended import ProgramChecks, ProgramEnd
from rlearner_sandbox.run import NoSandbox, Sandbox
from rlearner_sandbox.talk import SandboxFailed

__all__ = ["NoSandbox", "ProgramChecks", "ProgramEnd", "Sandbox", "SandboxFailed", "SandboxLimits"]
