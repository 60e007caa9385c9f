"""The processes of one run, each of which can be killed, frozen and restarted as systemd would.

Nothing here takes part in the run. A process that ends without a request is recorded in
``RunFleet.crashes``.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from broker.server.private_server import BrokerServer
from broker.system.children import spawn
from broker.system.entry import EXIT_STOPPED

LOOPBACK: Final = "127.0.0.1"
RESTART_AFTER_S: Final = 0.5
LOOK_EVERY_S: Final = 0.05
PATIENCE_S: Final = 150.0  # longest wait for processes to leave, on a busy machine
# what a learner says that ends with 2 because another one has its run
FENCED: Final = "a newer learner took over"
# what a process says that joins a run that is stopped
WAITS: Final = b"waiting for the learner to resume it"
MODULES: Final = {"learner": "rlearner.cli"} | {
    role: f"{role}.cli" for role in ("rollout", "envhub", "rewardhub")
}


@dataclass
class RunProcess:
    """One process of a role, under one name through all its lives."""

    name: str
    role: str
    command: list[str]
    log: Path
    process: subprocess.Popen[bytes] | None = None
    frozen: bool = False
    not_before: float = 0.0  # of the next start, 0: not waiting for one
    killed: bool = False  # by us, since it was last started
    done: bool = False  # it ended by itself with 0
    told: bool = False  # to end, since it was last started
    began: int = 0  # where in its log this life begins
    started: float = 0.0  # this life, seconds of the monotonic clock
    env: dict[str, str] = field(default_factory=dict)  # variables of its own
    may_end_with: str = ""  # what it may say when it ends with 2; anything else is a crash
    has_ended: bool = False  # that happened, so it is not started again by itself

    @property
    def pid(self) -> int:
        return self.process.pid if self.process is not None else 0

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def num_lines(self) -> int:
        """Return the log lines that the current process has written."""
        with self.log.open("rb") as log:
            log.seek(self.began)
            return log.read().count(b"\n")

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.began = log.tell()
            self.process = spawn(
                self.command, log, env={**os.environ, "OMP_NUM_THREADS": "1", **self.env}
            )
        self.killed = False
        self.told = False
        self.has_ended = False
        self.not_before = 0.0
        self.started = time.monotonic()

    def kill(self) -> None:
        """Send SIGKILL, but not to the workers it started: they must notice by themselves."""
        self.killed = True
        os.kill(self.pid, signal.SIGKILL)

    def freeze(self) -> None:
        self.frozen = True
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)
        self.frozen = False

    def came_late(self) -> bool:
        """Whether it was started when the run was over: it then waits for a learner that resumes
        it.
        """
        with self.log.open("rb") as log:
            log.seek(self.began)
            return WAITS in log.read()

    def tell(self) -> None:
        """Send SIGTERM once per process."""
        if not self.told:
            self.told = True
            os.kill(self.pid, signal.SIGTERM)

    def tail(self, lines: int = 12) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


@dataclass
class RunFleet:
    """A broker on one port and one store, and the children of one run; ``folder`` holds stores and
    logs.

    Attributes:
        bind: address of the broker; beyond loopback it requires TLS.
    """

    folder: Path
    run: str
    children: list[RunProcess] = field(default_factory=list)
    crashes: list[str] = field(default_factory=list)
    bind: str = LOOPBACK

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.port = free_port(self.bind)
        self._server: BrokerServer | None = None
        self._watching: asyncio.Task[None] | None = None

    # ------------------------------------------------------------------------------------------------
    # broker

    @property
    def url(self) -> str:
        return f"{'nats' if self.bind == LOOPBACK else 'tls'}://{self.bind}:{self.port}"

    @property
    def broker_pid(self) -> int:
        return self._server.pid if self._server is not None else 0

    def start_broker(self) -> None:
        """Start the broker on its port and store; return when it responds."""
        self._server = BrokerServer(str(self.folder / "broker"), bind=self.bind, port=self.port)
        self._server.start()

    async def restart_broker(self, after_s: float = RESTART_AFTER_S) -> None:
        """Kill the broker and start it again on the same store."""
        self.kill_broker()
        await self.revive_broker(after_s)

    def kill_broker(self) -> None:
        os.kill(self.broker_pid, signal.SIGKILL)

    async def revive_broker(self, after_s: float = RESTART_AFTER_S) -> None:
        """Start a killed broker again on the same store after a delay."""
        await asyncio.sleep(after_s)
        await asyncio.to_thread(self.start_broker)

    # ----------------------------------------------------------------------------------------------
    # children

    def add(self, role: str, name: str, *arguments: str) -> RunProcess:
        own = [] if role == "learner" else ["--run", self.run, "--id", name]
        command = [sys.executable, "-m", MODULES[role], *arguments, "--broker", self.url, *own]
        return self.start(RunProcess(name, role, command, self.folder / f"{name}.log"))

    def start(self, child: RunProcess) -> RunProcess:
        """Start a process that is started again when it ends."""
        child.start()
        self.children.append(child)
        return child

    def of(self, role: str) -> list[RunProcess]:
        return [child for child in self.children if child.role == role]

    async def __aenter__(self) -> RunFleet:
        await asyncio.to_thread(self.start_broker)
        self._watching = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._watching is not None
        self._watching.cancel()
        await asyncio.gather(self._watching, return_exceptions=True)
        for child in self.children:
            if child.running:
                os.kill(child.pid, signal.SIGKILL)
        for child in self.children:
            if child.process is not None:
                await asyncio.to_thread(child.process.wait)
        if self._server is not None:
            await asyncio.to_thread(self._server.stop)

    async def wait_done(
        self, children: Sequence[RunProcess], timeout_s: float = PATIENCE_S
    ) -> None:
        """Wait until all children have exited with 0 or as they may; raise TimeoutError naming one
        that has not.
        """
        deadline = time.monotonic() + timeout_s
        while waiting := [child for child in children if not (child.done or child.has_ended)]:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    "\n".join(f"{child.name} does not end:\n{child.tail()}" for child in waiting)
                )
            for child in waiting:
                if child.running and child.came_late():
                    child.tell()
            await asyncio.sleep(LOOK_EVERY_S)

    async def _watch(self) -> None:
        """Start again what was killed or has failed, as ``Restart=on-failure`` does."""
        while True:
            for child in self.children:
                self._look_at(child)
            await asyncio.sleep(LOOK_EVERY_S)

    def _look_at(self, child: RunProcess) -> None:
        if child.running or child.done or child.has_ended or child.process is None:
            return
        if not child.not_before:
            code = child.process.returncode
            if code in (0, EXIT_STOPPED):
                child.done = True
                return
            if code == 2 and child.may_end_with and child.may_end_with in child.tail():
                child.has_ended = True
                return
            if not (child.killed and code == -signal.SIGKILL):
                self.crashes.append(f"{child.name} ended by itself with {code}:\n{child.tail()}")
            child.not_before = time.monotonic() + RESTART_AFTER_S
        elif time.monotonic() >= child.not_before:
            child.start()


def free_port(address: str = LOOPBACK) -> int:
    """Return a TCP port of an address of this host that is free now."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def run_audit(folder: Path, url: str, tap: Path | None = None) -> dict[str, Any]:
    """Return the output of ``rlearner audit RUN --json`` with its exit code as ``code``."""
    command = [
        sys.executable,
        "-m",
        "rlearner.cli",
        "audit",
        str(folder),
        "--json",
        "--broker",
        url,
    ]
    command += ["--connect-deadline", "90"]
    done = subprocess.run(
        [*command, *(["--tap", str(tap)] if tap else [])],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if not done.stdout.startswith("{"):
        raise RuntimeError(done.stderr)
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures | {"code": done.returncode}
