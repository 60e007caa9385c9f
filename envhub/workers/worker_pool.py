"""Manages a hub's worker processes: leased for an episode, reused by the next, killed if they fail.

Each environment has its own process, so that a failure costs only its own episode. A process forked
from a prepared one takes milliseconds to start and shares its memory; see
``envhub.workers.forkserver``.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import subprocess
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import msgspec

from broker.errors import RlearnerError, reason_of
from broker.settings.secret import variables
from broker.system.children import cpu_s
from broker.system.workers import limits, line
from broker.system.workers.output import WorkerOutput
from broker.system.workers.start import start
from broker.system.workers.work_clock import OutOfTime, wait_for_bytes
from envhub.domain import Domain
from envhub.workers import protocol
from envhub.workers.calls import CallFailed
from envhub.workers.forkserver import LAST_BREATH_S
from envhub.workers.remote import RemoteEnvironment
from envhub.workers.sandboxed import sandboxed_start
from rlearner_sandbox import NoSandbox

__all__ = ["NoWorker", "RemoteEnvironment", "WorkerPool", "WorkerPools"]

log = logging.getLogger(__name__)

# All on the forkserver's own clock: a loaded machine must not end it, and all episodes with it.
# to import an environment and read its data; doubled after each failure
START_S: Final = 60.0
LONGEST_START_S: Final = 960.0
ORDER_S: Final = 10.0


class NoWorker(RlearnerError):
    """No worker process can be started on this machine at present; the machine is to blame."""


class WorkerPool:
    """The worker processes of one domain.

    Attributes:
        living: those that are not reaped.
        num_died: those that exited by themselves or were killed for their memory.
    """

    def __init__(self, domain: Domain, memory_mib: int | None, passed: Sequence[str] = ()) -> None:
        self.domain = domain
        self._memory_mib = memory_mib
        self._passed = {*passed, *variables(domain.args)}
        self.living: set[int] = set()
        self.num_died = self.num_leasing = 0
        self.reaped_cpu_s = 0.0
        self._forkserver: tuple[subprocess.Popen[bytes], socket.socket] | None = None
        self._output: WorkerOutput | None = None
        self._start_s = START_S
        self._forkserver_lock = asyncio.Lock()
        self._reaping: dict[int, asyncio.Task[str]] = {}
        self._closing: set[asyncio.Task[None]] = set()

    async def environment(self) -> RemoteEnvironment:
        """Return a new environment in its own process; its constructor has not run yet.

        Raises:
            NoWorker: if no process can be started.
            CallFailed: if the environment cannot be loaded there.
        """
        leasing = asyncio.create_task(self._lease())
        self.num_leasing += 1
        leasing.add_done_callback(self._leased)
        try:
            # a fork under way cannot be taken back, so its worker is closed later
            return await asyncio.shield(leasing)
        except asyncio.CancelledError:
            leasing.add_done_callback(self._unwanted)
            raise

    def _leased(self, _: asyncio.Task[RemoteEnvironment]) -> None:
        self.num_leasing -= 1

    async def _lease(self) -> RemoteEnvironment:
        ours, theirs = socket.socketpair()
        try:
            async with self._forkserver_lock:
                with theirs:
                    forkserver = self._forkserver or await self._start()
                    forked = await asyncio.to_thread(
                        _send_order,
                        forkserver,
                        protocol.ForkWorker(),
                        ORDER_S,
                        passed_socket=theirs,
                    )
            if not isinstance(forked, protocol.WorkerForked):
                unexpected = "the process that forks workers sent an unexpected answer"
                raise NoWorker(getattr(forked, "detail", unexpected))
        except (OSError, OutOfTime, msgspec.DecodeError) as error:
            ours.close()
            self._forget_forkserver()
            raise NoWorker(f"no worker process can be started: {reason_of(error)}") from None
        except BaseException:
            ours.close()
            raise
        self.living.add(forked.pid)
        return RemoteEnvironment(
            self, self.domain.args, forked.pid, await line.WorkerSocket.open(ours)
        )

    def _unwanted(self, leasing: asyncio.Task[RemoteEnvironment]) -> None:
        """Close an environment whose episode was given up before its worker started."""
        if not leasing.cancelled() and leasing.exception() is None:
            task = asyncio.create_task(leasing.result().close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def reap(self, environment: RemoteEnvironment, *, hung_up: bool) -> str:
        """Kill an environment's process, once. Return how it ended, if by itself."""
        pid = environment.pid
        if pid not in self._reaping and pid in self.living:
            self._reaping[pid] = asyncio.create_task(self._reap_worker(pid, hung_up))
        task = self._reaping.get(pid)
        if task is None:
            return "died"
        return await asyncio.shield(task)

    async def _reap_worker(self, pid: int, hung_up: bool) -> str:
        cause = "died"
        try:
            async with self._forkserver_lock:
                if self._forkserver is not None:
                    order = protocol.ReapWorker(pid, hung_up)
                    report = await asyncio.to_thread(
                        _send_order, self._forkserver, order, ORDER_S + LAST_BREATH_S
                    )
                    if isinstance(report, protocol.WorkerReaped):
                        self.reaped_cpu_s += report.cpu_s
                        self.num_died += bool(report.how)
                        cause = report.how or cause
        except (OSError, OutOfTime, msgspec.DecodeError) as error:
            log.warning(
                "domain %s: the forkserver and its workers are gone (%s)",
                self.domain.name,
                reason_of(error),
            )
            self._forget_forkserver()
        # also if that failed: workers end with their forkserver
        self.living.discard(pid)
        self._reaping.pop(pid, None)
        return cause

    async def close(self) -> None:
        """End all processes at once."""
        async with self._forkserver_lock:
            self._forget_forkserver()
        if self._output is not None:
            self._output.close()

    def cpu_s(self) -> float:
        """Return the CPU seconds of all workers so far."""
        # in a sandbox, workers have other pids there
        pids = limits.tree(self._forkserver[0].pid) if self._forkserver else []
        return self.reaped_cpu_s + sum(map(cpu_s, pids))

    async def _start(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        # a fork copies one thread only, so code that starts threads is not preloaded
        for preload in (True, False):
            ready = await self._prepare(preload)
            if isinstance(ready, protocol.RequestRefused):
                self._forget_forkserver()
                raise CallFailed(ready.detail)
            if isinstance(ready, protocol.ForkserverReady) and (
                ready.num_threads == 1 or not preload
            ):
                break
            log.warning(
                "environment %s starts threads when it is imported, so each worker imports it "
                "for itself",
                self.domain.section.env,
            )
            self._forget_forkserver()
        assert self._forkserver is not None
        return self._forkserver

    async def _prepare(self, preload: bool) -> Any:
        self._output = self._output or WorkerOutput(f"domain {self.domain.name}")
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                child = await asyncio.to_thread(self._launch, theirs)
            except BaseException:
                ours.close()
                raise
        self._forkserver = (child, ours)
        section = self.domain.section.model_dump(mode="json")
        setup = protocol.SetupDomain(self.domain.name, section, self._memory_mib, preload)
        name = f"importing environment {self.domain.section.env}"
        try:
            ready = await asyncio.to_thread(
                _send_order, self._forkserver, setup, self._start_s, name=name
            )
        except OutOfTime:
            self._start_s = min(2.0 * self._start_s, LONGEST_START_S)
            raise
        self._start_s = START_S
        return ready

    def _launch(self, theirs: socket.socket) -> subprocess.Popen[bytes]:
        assert self._output is not None
        launch = partial(
            start,
            "envhub.workers.forkserver",
            theirs,
            self._output.file,
            death_signal=signal.SIGTERM,
            passed=self._passed,
        )
        try:
            with sandboxed_start(self.domain) as sandbox:
                if sandbox is None:
                    return launch()
                return launch(within=sandbox.within, uid=sandbox.uid, files=sandbox.files)
        except NoSandbox as error:
            # handled like all reasons why no process can be started
            raise OSError(str(error)) from None

    def _forget_forkserver(self) -> None:
        """End the process that forks workers; they exit with it."""
        if self._forkserver is None:
            return
        child, ours = self._forkserver
        self._forkserver = None
        ours.close()
        child.terminate()


class WorkerPools:
    """The worker pools of a hub's domains.

    Args:
        memory_mib: limit of each worker process, beyond what it starts with; None: no limit.
        passed: environment variables that they get besides the harmless ones and those that a
            domain refers to.
    """

    def __init__(self, memory_mib: int | None, passed: Sequence[str] = ()) -> None:
        self._memory_mib = memory_mib
        self.passed = passed
        self._pools: dict[str, WorkerPool] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._closed_died = 0
        self._closed_cpu_s = 0.0

    @property
    def living(self) -> int:
        """Worker processes at present."""
        return sum(len(pool.living) for pool in self._pools.values())

    @property
    def num_died(self) -> int:
        """Worker processes that exited by themselves or were killed for their memory, so far."""
        return self._closed_died + sum(pool.num_died for pool in self._pools.values())

    def cpu_s(self) -> float:
        """Return the CPU seconds of all worker processes so far."""
        return self._closed_cpu_s + sum(pool.cpu_s() for pool in self._pools.values())

    async def environment(self, domain: Domain) -> RemoteEnvironment:
        """Return a new environment, as ``WorkerPool.environment``."""
        pool = self._pools.get(domain.name)
        if pool is None or pool.domain != domain:
            if pool is not None:
                self._replace(pool)
            pool = self._pools[domain.name] = WorkerPool(domain, self._memory_mib, self.passed)
        return await pool.environment()

    async def close(self) -> None:
        """End all worker processes."""
        await asyncio.gather(*(pool.close() for pool in self._pools.values()), *self._closing)

    def _replace(self, pool: WorkerPool) -> None:
        """Close the pool of a domain with new settings once its old episodes have ended."""
        task = asyncio.create_task(self._outlive(pool))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _outlive(self, pool: WorkerPool) -> None:
        try:
            # polled, as a set has no event and new settings are rare
            while pool.living or pool.num_leasing:  # noqa: ASYNC110
                await asyncio.sleep(1.0)
        finally:
            self._closed_died += pool.num_died
            self._closed_cpu_s += pool.reaped_cpu_s
            await pool.close()


def _send_order(
    forkserver: tuple[subprocess.Popen[bytes], socket.socket],
    order: Any,
    within_s: float,
    *,
    passed_socket: socket.socket | None = None,
    name: str = "",
) -> Any:
    """Send a request and return its reply; blocks.

    Args:
        within_s: until the reply begins, on the clock of the forkserver and its workers.
        along: a socket to pass on.
        name: of the work, to log that it is slow.

    Raises:
        OSError: if the other end is gone.
        OutOfTime: if it does not reply in time.
        msgspec.DecodeError: if the reply is malformed.
    """
    child, control = forkserver
    data = line.frame(protocol.ENCODER.encode(order))
    num_sent = socket.send_fds(
        control, [data], [passed_socket.fileno()] if passed_socket is not None else []
    )
    control.sendall(data[num_sent:])
    wait_for_bytes(control, child.pid, within_s, name)
    (size,) = line.HEADER.unpack(_receive_exactly(control, line.HEADER.size))
    if size > line.MAX_ANSWER_BYTES:
        raise OSError(f"its reply has {size} bytes, the limit is {line.MAX_ANSWER_BYTES}")
    return protocol.REPORTS.decode(_receive_exactly(control, size))


def _receive_exactly(control: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        if not (more := control.recv(size - len(data))):
            raise ConnectionResetError("the process that forks workers ended")
        data += more
    return bytes(data)
