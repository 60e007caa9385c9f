"""The scene of attempts to escape from the sandbox: valuable things outside it, and how an attempt
is run.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rlearner_sandbox import Sandbox
from rlearner_sandbox.command import SandboxLimits, python

SECRET: Final = "a-secret-of-the-host-5261"
GOT: Final = b"ESCAPED"
LIMITS: Final = SandboxLimits(
    wall_s=20.0, cpu_s=1, memory_mib=128, processes=16, open_files=32, output_kib=256, file_mib=16
)


@dataclass
class EscapeScene:
    """What there is outside."""

    folder: Path  # holds the file ``secret``, may be written
    port: int  # somebody listens on loopback
    listener: socket.socket
    abstract: str  # the name of an abstract Unix socket that listens
    unix: socket.socket
    bystander: subprocess.Popen[bytes]  # an innocent process
    open_fd: int  # the secret, open and inheritable

    @property
    def secret(self) -> str:
        return str(self.folder / "secret")

    @property
    def marker(self) -> str:
        return f"marker-{self.folder.name}"

    def called(self) -> bool:
        """Decide whether anything connected."""
        for one in (self.listener, self.unix):
            with contextlib.suppress(BlockingIOError):
                one.accept()[0].close()
                return True
        return False


@contextlib.contextmanager
def scene() -> Iterator[EscapeScene]:
    """Set it up: standard input and the environment of this process hold the secret too."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "secret").write_text(SECRET, encoding="utf-8")
        folder.chmod(0o777)
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        unix = stack.enter_context(socket.socket(socket.AF_UNIX))
        name = f"escape-{folder.name}"
        unix.bind("\0" + name)
        unix.listen()
        for one in (listener, unix):
            one.setblocking(False)
        os.environ["RL_ESCAPE_SECRET"] = SECRET
        stack.callback(os.environ.pop, "RL_ESCAPE_SECRET", None)
        bystander = subprocess.Popen(["sleep", "600"])
        stack.callback(bystander.wait)
        stack.callback(bystander.kill)
        fd = os.open(folder / "secret", os.O_RDONLY)
        os.set_inheritable(fd, True)
        stack.callback(os.close, fd)
        before = os.dup(0)
        os.dup2(fd, 0)
        stack.callback(os.close, before)
        stack.callback(os.dup2, before, 0)
        yield EscapeScene(folder, listener.getsockname()[1], listener, name, unix, bystander, fd)


@dataclass
class EscapeResult:
    """What can be seen of an attempt from outside."""

    stdout: bytes
    seconds: float
    how: str = ""


Effect = Callable[[EscapeScene, EscapeResult], bool]


def says(_: EscapeScene, result: EscapeResult) -> bool:
    """Decide whether the program printed what it obtained."""
    return GOT in result.stdout or SECRET.encode() in result.stdout


@dataclass(frozen=True)
class EscapeAttempt:
    """One attempt: names in braces are attributes of the scene.

    Attributes:
        escaped: whether it succeeded.
        harmless: whether it may be run without a sandbox, as root at least.
        how: how it must end, where it is a limit that stops it.
        wall_s: a time limit of its own.
    """

    name: str
    program: str
    escaped: Effect = says
    harmless: bool = True
    how: str = ""
    wall_s: float | None = None

    def source(self, scene: EscapeScene) -> str:
        """Return the program with the names of the scene filled in."""
        source = PRELUDE + self.program
        for name in ("secret", "port", "abstract", "folder", "marker", "open_fd"):
            source = source.replace("{" + name + "}", str(getattr(scene, name)))
        return source.replace("{pid}", str(scene.bystander.pid))

    def inside(self, sandbox: Sandbox, scene: EscapeScene) -> EscapeResult:
        began = time.monotonic()
        ended = sandbox.run(self.source(scene), wall_s=self.wall_s)
        how = "time" if ended.timed_out else "memory" if ended.out_of_memory else ended.killed_for
        return EscapeResult(ended.stdout, time.monotonic() - began, how)

    def bare(self, scene: EscapeScene) -> EscapeResult:
        began = time.monotonic()
        done = subprocess.run(
            [python(), "-I", "-c", self.source(scene)], stdin=0, capture_output=True, timeout=30,
            pass_fds=(scene.open_fd,), cwd=scene.folder, check=False,
        )  # fmt: skip
        return EscapeResult(done.stdout, time.monotonic() - began)


PRELUDE: Final = """
import ctypes, os, signal, socket, sys, time
libc = ctypes.CDLL(None, use_errno=True)
def read(path):
    try:
        with open(path, "rb") as file:
            return file.read(100000)
    except OSError:
        return b""
def got(what="ESCAPED"):
    print(what, flush=True)
"""
