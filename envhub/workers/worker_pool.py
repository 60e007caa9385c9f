"""Manages a hub's worker processes: leased for an episode, reused by the next, killed when they
fail.

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

# On the forkserver's own clock: a loaded machine must not end it, and all episodes with it.
# to import an environment and read its data; twice as long after each failure
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
        self.buried_cpu_s = 0.0
        self._zygote: tuple[subprocess.Popen[bytes], socket.socket] | None = None
        self._output: WorkerOutput | None = None
        self._start_s = START_S
        self._ordering = asyncio.Lock()
        self._burials: dict[int, asyncio.Task[str]] = {}
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
            return await asyncio.shield(leasing)
        except asyncio.CancelledError:
            leasing.add_done_callback(self._unwanted)
            raise

    def _leased(self, _: asyncio.Task[RemoteEnvironment]) -> None:
        self.num_leasing -= 1

    async def _lease(self) -> RemoteEnvironment:
        ours, theirs = socket.socketpair()
        try:
            async with self._ordering:
                with theirs:
                    zygote = self._zygote or await self._start()
                    forked = await asyncio.to_thread(
                        _order, zygote, protocol.ForkWorker(), ORDER_S, along=theirs
                    )
            if not isinstance(forked, protocol.WorkerForked):
                raise NoWorker(
                    getattr(
                        forked, "detail", "the process that forks workers sent an unexpected answer"
                    )
                )
        except (OSError, OutOfTime, msgspec.DecodeError) as error:
            ours.close()
            self._forget_zygote()
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

    async def bury(self, environment: RemoteEnvironment, *, hung_up: bool) -> str:
        """Kill an environment's process, once. Return how it ended, if by itself."""
        pid = environment.pid
        if pid not in self._burials and pid in self.living:
            self._burials[pid] = asyncio.create_task(self._bury(pid, hung_up))
        task = self._burials.get(pid)
        return await asyncio.shield(task) if task is not None else "died"

    async def _bury(self, pid: int, hung_up: bool) -> str:
        cause = "died"
        try:
            async with self._ordering:
                if self._zygote is not None:
                    order = protocol.ReapWorker(pid, hung_up)
                    buried = await asyncio.to_thread(
                        _order, self._zygote, order, ORDER_S + LAST_BREATH_S
                    )
                    if isinstance(buried, protocol.WorkerReaped):
                        self.buried_cpu_s += buried.cpu_s
                        self.num_died += bool(buried.how)
                        cause = buried.how or cause
        except (OSError, OutOfTime, msgspec.DecodeError) as error:
            log.warning(
                "domain %s: the forkserver and its workers are gone (%s)",
                self.domain.name,
                reason_of(error),
            )
            self._forget_zygote()
        self.living.discard(pid)
        self._burials.pop(pid, None)
        return cause

    async def close(self) -> None:
        """End all processes at once."""
        async with self._ordering:
            self._forget_zygote()
        if self._output is not None:
            self._output.close()

    def cpu_s(self) -> float:
        """Return the CPU seconds of all workers so far."""
        # in a sandbox, workers have other pids there
        pids = limits.tree(self._zygote[0].pid) if self._zygote else []
        return self.buried_cpu_s + sum(map(cpu_s, pids))

    async def _start(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        for preload in (True, False):
            ready = await self._prepare(preload)
            if isinstance(ready, protocol.RequestRefused):
                self._forget_zygote()
                raise CallFailed(ready.detail)
            if isinstance(ready, protocol.ForkserverReady) and (
                ready.num_threads == 1 or not preload
            ):
                break
            env = self.domain.section.env
            log.warning(
                "environment %s starts threads when it is imported, so each worker imports it for itself",
                env,
            )
            self._forget_zygote()
        assert self._zygote is not None
        return self._zygote

    async def _prepare(self, preload: bool) -> Any:
        self._output = self._output or WorkerOutput(f"domain {self.domain.name}")
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                child = await asyncio.to_thread(self._launch, theirs)
            except BaseException:
                ours.close()
                raise
        self._zygote = (child, ours)
        section = self.domain.section.model_dump(mode="json")
        setup = protocol.SetupDomain(self.domain.name, section, self._memory_mib, preload)
        name = f"importing environment {self.domain.section.env}"
        try:
            ready = await asyncio.to_thread(_order, self._zygote, setup, self._start_s, name=name)
        except OutOfTime:
            self._start_s = min(2.0 * self._start_s, LONGEST_START_S)
            raise
        self._start_s = START_S
        return ready

    def _launch(self, theirs: socket.socket) -> subprocess.Popen[bytes]:
        assert self._output is not None
        arguments = ("envhub.workers.forkserver", theirs, self._output.file, (), signal.SIGTERM)
        try:
            with sandboxed_start(self.domain) as sandbox_start:
                if sandbox_start is None:
                    return start(*arguments, passed=self._passed)
                return start(
                    *arguments,
                    passed=self._passed,
                    within=sandbox_start.within,
                    uid=sandbox_start.uid,
                    files=sandbox_start.files,
                )
        except NoSandbox as error:
            raise OSError(str(error)) from None

    def _forget_zygote(self) -> None:
        """End the process that forks workers; they exit with it."""
        if self._zygote is None:
            return
        (child, ours), self._zygote = self._zygote, None
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
        self._nurseries: dict[str, WorkerPool] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._gone_died = 0
        self._gone_cpu_s = 0.0

    @property
    def living(self) -> int:
        """Worker processes at present."""
        return sum(len(nursery.living) for nursery in self._nurseries.values())

    @property
    def num_died(self) -> int:
        """Worker processes that exited by themselves or were killed for their memory, so far."""
        return self._gone_died + sum(nursery.num_died for nursery in self._nurseries.values())

    def cpu_s(self) -> float:
        """Return the CPU seconds of all worker processes so far."""
        return self._gone_cpu_s + sum(nursery.cpu_s() for nursery in self._nurseries.values())

    async def environment(self, domain: Domain) -> RemoteEnvironment:
        """Return a new environment, as ``WorkerPool.environment``."""
        nursery = self._nurseries.get(domain.name)
        if nursery is None or nursery.domain != domain:
            if nursery is not None:
                self._replace(nursery)
            nursery = self._nurseries[domain.name] = WorkerPool(
                domain, self._memory_mib, self.passed
            )
        return await nursery.environment()

    async def close(self) -> None:
        """End all worker processes."""
        await asyncio.gather(
            *(nursery.close() for nursery in self._nurseries.values()), *self._closing
        )

    def _replace(self, nursery: WorkerPool) -> None:
        """Close the pool of a domain with new settings once the episodes under the old ones have
        ended.
        """
        task = asyncio.create_task(self._outlive(nursery))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _outlive(self, nursery: WorkerPool) -> None:
        try:
            while nursery.living or nursery.num_leasing:  # noqa: ASYNC110 - a set has no event, and this is rare
                await asyncio.sleep(1.0)
        finally:
            self._gone_died += nursery.num_died
            self._gone_cpu_s += nursery.buried_cpu_s
            await nursery.close()


def _order(
    forkserver: tuple[subprocess.Popen[bytes], socket.socket],
    order: Any,
    within_s: float,
    *,
    along: socket.socket | None = None,
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
    num_sent = socket.send_fds(control, [data], [along.fileno()] if along is not None else [])
    control.sendall(data[num_sent:])
    wait_for_bytes(control, child.pid, within_s, name)
    (size,) = line.HEADER.unpack(_exactly(control, line.HEADER.size))
    if size > line.MAX_ANSWER_BYTES:
        raise OSError(f"its reply has {size} bytes, the limit is {line.MAX_ANSWER_BYTES}")
    return protocol.REPORTS.decode(_exactly(control, size))


def _exactly(control: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        if not (more := control.recv(size - len(data))):
            raise ConnectionResetError("the process that forks workers ended")
        data += more
    return bytes(data)
