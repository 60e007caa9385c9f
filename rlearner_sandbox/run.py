"""Starts programs in the sandbox and reports how they ended."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import secrets
import shutil
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Final, Literal

from broker.errors import NotInstalled
from rlearner_sandbox import seccomp
from rlearner_sandbox.command import ENVIRONMENT, Mode, SandboxLimits, code, free_uid, inside, jail
from rlearner_sandbox.ended import PROGRAM_GONE, ProgramChecks, ProgramEnd
from rlearner_sandbox.names import names_of
from rlearner_sandbox.talk import ProcessLoop, SandboxFailed, SandboxProcess

Kind = Literal["bubblewrap", "none"]
Task = Literal["script", "asserts", "calls"]

# For a program whose tests say that it is gone, to end as it does.
LAST_WORDS_S: Final = 2.0

_SEALS: Final = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


class NoSandbox(NotInstalled):
    """Raised when no sandbox works on this machine; says what to do about it."""


class Sandbox:
    """Runs programs, one at a time and thread.

    Args:
        limits: of each program.
        kind: ``none`` runs programs with limits alone, as the current user. Choosing it accepts the
            risk.
        packages: folders that programs may import from, besides the standard library.

    Raises:
        NoSandbox: bubblewrap is missing, or does not work here.
    """

    _numbers = itertools.count()

    def __init__(
        self,
        limits: SandboxLimits | None = None,
        kind: Kind = "bubblewrap",
        packages: Sequence[str] = (),
    ) -> None:
        self.limits = limits or SandboxLimits()
        self._kind = kind
        self._packages = tuple(packages)
        self._root = os.geteuid() == 0
        self._bwrap = shutil.which("bwrap") or ""
        if kind == "none":
            return
        if not self._bwrap:
            raise NoSandbox(
                "there is no bubblewrap (bwrap) on PATH; run: apt-get install bubblewrap"
            )
        try:
            self._filter = seccomp.program()
        except KeyError as error:
            raise NoSandbox(
                f"no filter on system calls for machines of kind {error}; use x86_64 or aarch64"
            ) from None
        try:
            self.run("")
        except SandboxFailed as error:
            raise NoSandbox(str(error)) from None

    def run(
        self,
        program: str,
        *,
        mode: Task = "script",
        stdin: bytes = b"",
        tests: ProgramChecks | None = None,
        wall_s: float | None = None,
    ) -> ProgramEnd:
        """Run a program until it exits or is killed.

        Args:
            program: Python source. As a ``script`` it is ``__main__``, else the module
                ``solution``.
            mode: ``asserts`` executes each test in a second sandbox; ``calls`` calls a function of
                the program.
            tests: for the two other modes; sent to the program only after it has been executed.
            wall_s: replaces the one of ``limits``.

        Raises:
            SandboxFailed: if it could not run, which says nothing about the program.
        """
        wall_s = self.limits.wall_s if wall_s is None else wall_s
        if mode == "asserts":
            assert tests is not None
            return self._run_asserts(program, tests, wall_s)
        token = ""
        checks: tuple[str, ...] = ()
        if tests is not None:
            # The program may write to this socket, too, but cannot guess the token.
            token = secrets.token_hex(16)
            checks = (token, tests.first, str(len(tests.cases)), *tests.cases)
        with (
            ProcessLoop() as loop,
            self._start(
                mode, wall_s, [program], later_texts=checks, token=token, stdin=stdin
            ) as talk,
        ):
            loop.add(talk)
            loop.until(lambda: False)
            return talk.ended()

    def _run_asserts(self, program: str, tests: ProgramChecks, wall_s: float) -> ProgramEnd:
        """Run the program in one sandbox and its tests in another, with a socket between."""
        names = names_of((tests.first, *tests.cases))
        token = secrets.token_hex(16)
        names_json = json.dumps({"program": names.program, "library": names.library})
        texts = [token, names_json, tests.first, str(len(tests.cases)), *tests.cases]
        theirs, ours = socket.socketpair()
        with (
            theirs,
            ours,
            ProcessLoop() as loop,
            self._start("asserts", wall_s, [program], token=token, channel=theirs) as host,
        ):
            loop.add(host)
            # The tests start once the program is loaded, so its time limit is its own.
            loop.until(lambda: host.loaded or host.silent)
            if not host.loaded or loop.is_over(host):
                host.stop(after_s=LAST_WORDS_S)
                loop.until(lambda: False)
                return host.ended()
            with self._start("tests", host.unlimited(), texts, token=token, channel=ours) as judge:
                loop.add(judge)
                loop.until(lambda: loop.is_over(judge))
                judged = judge.ended()
                loop.remove(judge)
            host.stop(after_s=LAST_WORDS_S if judged.exit_code == PROGRAM_GONE else 0.0)
            loop.until(lambda: False)
            return _merge_ends(host.ended(), judged)

    def _start(
        self,
        mode: Mode,
        wall_s: float,
        texts: Sequence[str],
        *,
        later_texts: Sequence[str] = (),
        token: str = "",
        stdin: bytes = b"",
        channel: socket.socket | None = None,
    ) -> SandboxProcess:
        """Start a process that runs ``inside.py``; its end of the channel is closed here."""
        ours, theirs = socket.socketpair()
        files = [sealed_file(stdin)]
        try:
            ours.send(code(mode))
            command, passed = self._command(
                mode, theirs.fileno(), -1 if channel is None else channel.fileno(), files
            )
            child = subprocess.Popen(
                command,
                stdin=files[0],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=ENVIRONMENT,
                cwd="/",
                pass_fds=passed,
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            raise SandboxFailed(f"no process can be started: {error}") from None
        finally:
            theirs.close()
            if channel is not None:
                channel.close()
            for fd in files:
                os.close(fd)
        return SandboxProcess(
            child,
            ours,
            self.limits,
            wall_s=wall_s,
            texts=texts,
            later_texts=later_texts,
            token=token,
        )

    def _command(
        self, mode: Mode, control: int, channel: int, files: list[int]
    ) -> tuple[list[str], tuple[int, ...]]:
        passed = (control,) if channel < 0 else (control, channel)
        # No limit on processes here: the kernel counts all that this user has.
        if self._kind == "none":
            python = inside(
                control,
                mode,
                self.limits,
                uid=0,
                processes=0,
                channel=channel,
                packages=self._packages,
            )
            return python, passed
        files.append(sealed_file(self._filter))
        uid = 0
        if self._root:
            uid = free_uid(os.getpid() * 16 + next(self._numbers) % 16, id_maps())
        head = jail(self._bwrap, files[-1], self.limits, root=self._root, packages=self._packages)
        num_processes = self.limits.processes
        packages = self._packages
        python = inside(
            control,
            mode,
            self.limits,
            uid=uid,
            processes=num_processes,
            channel=channel,
            packages=packages,
        )
        return head + python, (*passed, files[-1])


def _merge_ends(host: ProgramEnd, judged: ProgramEnd) -> ProgramEnd:
    """Return the end of a program with the verdicts of its tests."""
    tests_exit_code = 0 if judged.exit_code == PROGRAM_GONE else judged.exit_code
    exit_code = host.exit_code or tests_exit_code
    killed_for = host.killed_for or judged.killed_for
    return replace(
        host,
        exit_code=exit_code,
        killed_for=killed_for,
        answers=judged.answers,
        stderr=judged.stderr,
    )


@lru_cache(maxsize=1)
def id_maps() -> list[str]:
    """Return the maps of uids and gids of this process's user namespace."""
    return [Path(f"/proc/self/{name}_map").read_text(encoding="ascii") for name in ("uid", "gid")]


def sealed_file(data: bytes) -> int:
    """Return a sealed file in memory, open at its beginning."""
    fd = os.memfd_create("sandbox", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    unwritten = memoryview(data)
    while unwritten:
        unwritten = unwritten[os.write(fd, unwritten) :]
    os.lseek(fd, 0, os.SEEK_SET)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    return fd
