"""Starts programs in the sandbox, and says how each ended."""

from __future__ import annotations

import fcntl
import itertools
import os
import shutil
import socket
import subprocess
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Final, Literal

from broker.errors import NotInstalled
from sandbox import seccomp
from sandbox.command import ENVIRONMENT, Limits, code, free_uid, inside, jail
from sandbox.ended import Checks, Ended
from sandbox.talk import SandboxFailed, Talk

Kind = Literal["bubblewrap", "none"]
Mode = Literal["script", "asserts", "calls"]

_SEALS: Final = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


class NoSandbox(NotInstalled):
    """There is no working sandbox on this machine; says what to do about it."""


class Sandbox:
    """Runs programs, one at a time and thread.

    Args:
        limits: of each program.
        kind: ``none`` runs programs with limits alone, as the user that we are. Whoever asks for that accepts the risk.
        packages: folders that programs may import from, besides the standard library.

    Raises:
        NoSandbox: bubblewrap is missing, or does not work here.
    """

    _numbers = itertools.count()

    def __init__(self, limits: Limits | None = None, kind: Kind = "bubblewrap", packages: Sequence[str] = ()) -> None:
        self.limits = limits or Limits()
        self._kind, self._packages = kind, tuple(packages)
        self._root = os.geteuid() == 0
        self._bwrap = shutil.which("bwrap") or ""
        if kind == "none":
            return
        if not self._bwrap:
            raise NoSandbox("there is no bubblewrap (bwrap) on PATH; run: apt-get install bubblewrap")
        try:
            self._filter = seccomp.program()
        except KeyError as error:
            raise NoSandbox(f"no filter on system calls for machines of kind {error}; use x86_64 or aarch64") from None
        try:
            self.run("")
        except SandboxFailed as error:
            raise NoSandbox(str(error)) from None

    def run(
        self, program: str, *, mode: Mode = "script", stdin: bytes = b"", tests: Checks | None = None, wall_s: float | None = None
    ) -> Ended:
        """Run a program until it ends or has to.

        Args:
            program: Python source. As a ``script`` it is ``__main__``, else the module ``solution``.
            mode: ``asserts`` executes each test, ``calls`` calls a function of the program's.
            stdin: what it can read.
            tests: for the two other modes; the program does not see them before it has been executed.
            wall_s: instead of the one of ``limits``.

        Raises:
            SandboxFailed: it could not be run; the program may be as good as any.
        """
        ours, theirs = socket.socketpair()
        files = [_file(stdin)]
        try:
            ours.send(code())
            with theirs:
                command, passed = self._command(mode, theirs.fileno(), files)
                try:
                    child = subprocess.Popen(
                        command, stdin=files[0], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT, cwd="/",
                        pass_fds=passed, start_new_session=True,
                    )  # fmt: skip
                except OSError as error:
                    raise SandboxFailed(f"no process can be started: {error}") from None
            with Talk(child, ours, self.limits, self.limits.wall_s if wall_s is None else wall_s) as talk:
                return talk.run(program, tests)
        finally:
            ours.close()
            for fd in files:
                os.close(fd)

    def _command(self, mode: Mode, control: int, files: list[int]) -> tuple[list[str], tuple[int, ...]]:
        if self._kind == "none":  # processes cannot be limited: the kernel counts all that this user has
            return inside(control, mode, self.limits, uid=0, processes=0), (control,)
        files.append(_file(self._filter))
        uid = 0
        if self._root:
            uid = free_uid(os.getpid() * 16 + next(self._numbers) % 16, _id_maps())
        head = jail(self._bwrap, files[-1], self.limits, root=self._root, packages=self._packages)
        return head + inside(control, mode, self.limits, uid=uid, processes=self.limits.processes), (control, files[-1])


@lru_cache(maxsize=1)
def _id_maps() -> list[str]:
    return [Path(f"/proc/self/{name}_map").read_text(encoding="ascii") for name in ("uid", "gid")]


def _file(data: bytes) -> int:
    """A file in memory that nobody can change any more, open at its beginning."""
    fd = os.memfd_create("sandbox", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]
    os.lseek(fd, 0, os.SEEK_SET)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    return fd
