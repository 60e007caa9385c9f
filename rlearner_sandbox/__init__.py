"""Runs untrusted Python programs under bubblewrap (Linux).

A program has its own process, network, IPC and mount namespaces; a read-only root that contains
only the C library and Python; a private ``/proc``; a ``/tmp`` of bounded size; an empty
environment; an unprivileged uid without capabilities; a filter on system calls; limits on time,
memory, processes, files and output. It ends with the process that started it.

Tests of a program's functions (``mode="asserts"``) run in a second sandbox, where stand-ins
exchange plain data with the program (``rlearner_sandbox.remote``), so that changes of the program
to its own process do not reach them.

Not bounded: the kernel's memory for very many empty files, and the processor time of all processes
of a program together beyond ``wall_s`` times the processors.
"""

from __future__ import annotations

from rlearner_sandbox.command import SandboxLimits
from rlearner_sandbox.ended import ProgramChecks, ProgramEnd
from rlearner_sandbox.run import NoSandbox, Sandbox
from rlearner_sandbox.talk import SandboxFailed

__all__ = ["NoSandbox", "ProgramChecks", "ProgramEnd", "Sandbox", "SandboxFailed", "SandboxLimits"]
