"""The hub's side of the warden: starts it, and sends it plans."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import platform
import socket
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from rlearner_sandbox import seccomp
from rlearner_sandbox.command import python
from rlearner_sandbox.providers.base import SandboxError
from rlearner_sandbox.providers.namespace.plan import MAX_PACKET, EndPlan, Plan, encode_plan

log = logging.getLogger(__name__)

ROOT: Final = str(Path(__file__).resolve().parents[3])
# The warden only forks, so a full queue is empty again within milliseconds.
QUEUE_S: Final = 10.0
BOOT: Final = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from rlearner_sandbox.providers.namespace.warden import main; main(int(sys.argv[2]))"
)


def command_filter() -> bytes:
    """Return the filter on system calls for commands; empty on other machines than these.

    Memory files count as memory of their processes. Sockets for routes are for programs that list
    their network interfaces.
    """
    if platform.machine() not in seccomp.MACHINES:
        return b""
    return seccomp.program(memory_files=True, route_sockets=True)


class WardenLink:
    """A running warden.

    Args:
        on_end: called with the key of each sandbox that has ended.
    """

    def __init__(self, on_end: Callable[[int], None]) -> None:
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [python(), "-I", "-S", "-X", "utf8", "-c", BOOT, ROOT, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    env={},
                    cwd="/",
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
            except OSError as error:
                ours.close()
                raise SandboxError(f"no process can be started: {error}") from None
        ours.send(command_filter())
        ours.setblocking(False)
        self._channel = ours
        self._loop.add_reader(ours, self._receive)
        self.is_alive = True

    @property
    def pid(self) -> int:
        """The warden's process."""
        return self._process.pid

    async def post(self, plan: Plan, fds: Sequence[int]) -> None:
        """Send a plan, with open files.

        Raises:
            ValueError: if it is too large.
            SandboxError: if the warden has ended or does not take it in time.
        """
        packet = encode_plan(plan)
        if len(packet) > MAX_PACKET:
            raise ValueError(
                f"a command with its variables has {len(packet)} bytes, and at most {MAX_PACKET} "
                "can be; upload a script"
            )
        deadline = self._loop.time() + QUEUE_S
        while True:
            try:
                socket.send_fds(self._channel, [packet], list(fds))
                return
            except BlockingIOError:
                if self._loop.time() > deadline:
                    raise SandboxError("the process that makes sandboxes does not answer") from None
                await asyncio.sleep(0.005)
            except OSError as error:
                reason = f"the process that makes sandboxes has ended: {error}"
                raise SandboxError(reason) from None

    async def end_sandbox(self, key: int) -> None:
        """Ask the warden to end a sandbox."""
        with contextlib.suppress(SandboxError):
            await self.post(EndPlan(key), [])

    def _receive(self) -> None:
        while True:
            try:
                packet = self._channel.recv(MAX_PACKET)
            except BlockingIOError:
                return
            except OSError:
                packet = b""
            if not packet:
                self.close()
                return
            self._on_end(json.loads(packet)["ended"])

    def close(self) -> None:
        """End the warden with all its sandboxes; a second call does nothing."""
        if self.is_alive:
            self.is_alive = False
            self._loop.remove_reader(self._channel)
            self._channel.close()
            self._process.kill()
            self._process.wait()


class Reply:
    """The socket by which a process in a sandbox answers; ``fd`` goes along with the plan."""

    def __init__(self) -> None:
        self._ours, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ours.setblocking(False)
        self.fd = self._theirs.fileno()

    def passed(self) -> None:
        """Close the end that was passed on."""
        self._theirs.close()

    async def receive(self) -> tuple[dict[str, Any], list[int]]:
        """Return the answer and the files that came with it.

        Raises:
            SandboxError: if the other end was closed without one.
        """
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = loop.create_future()

        def set_ready() -> None:
            if not ready.done():
                ready.set_result(None)

        loop.add_reader(self._ours, set_ready)
        try:
            await ready
        finally:
            loop.remove_reader(self._ours)
        packet, fds = self._receive_packet()
        if not packet:
            raise SandboxError("the sandbox ended while it worked")
        for fd in fds:
            os.set_inheritable(fd, False)
        return json.loads(packet), fds

    def _receive_packet(self) -> tuple[bytes, list[int]]:
        # A process that ends without having read what was sent resets the socket; what it sent
        # itself comes after that.
        for _ in range(2):
            try:
                packet, fds, _, _ = socket.recv_fds(self._ours, MAX_PACKET, 4)
                return packet, fds
            except ConnectionResetError:
                continue
        return b"", []

    def ask_kill(self) -> None:
        """Ask the process to kill what it runs."""
        with contextlib.suppress(OSError):
            self._ours.send(b"kill")

    def close(self) -> None:
        """Close both ends, which makes the process kill what it runs."""
        self._ours.close()
        self._theirs.close()
