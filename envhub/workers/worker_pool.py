"""A hub's worker processes: leased for an episode, reused by the next, killed if they fail.

Each environment has its own process, so that a failure costs only its own episode.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
from collections.abc import Sequence
from functools import partial
from typing import IO

import msgspec

from broker.settings.secret import variables
from envhub.domain import Domain
from envhub.workers import protocol
from envhub.workers.calls import CallFailed
from envhub.workers.remote import RemoteEnvironment
from envhub.workers.sandboxed import sandboxed_start
from rlearner_sandbox import NoSandbox
from rlearner_workers.forked_workers import ForkedWorkers, ForkserverKind, LoadRefused, NoWorker
from rlearner_workers.start import start

__all__ = ["NoWorker", "RemoteEnvironment", "WorkerPool", "WorkerPools"]


class WorkerPool:
    """The worker processes of one domain.

    Args:
        memory_mib: of one environment.
        num_envs: environments of one process.

    Attributes:
        workers: the processes.
    """

    def __init__(
        self,
        domain: Domain,
        memory_mib: int | None,
        passed: Sequence[str] = (),
        num_envs: int = 1,
    ) -> None:
        self.domain = domain
        self._memory_mib = None if memory_mib is None else memory_mib * num_envs
        self._passed = {*passed, *variables(domain.args)}
        kind = ForkserverKind(
            f"domain {domain.name}",
            f"environment {domain.section.env}",
            launch=self._launch,
            setup=self._setup,
        )
        self.workers = ForkedWorkers(kind, protocol.ANSWERS, num_envs)

    async def environment(self) -> RemoteEnvironment:
        """Return a new environment in its own process; its constructor has not run yet.

        Raises:
            NoWorker: if no process can be started.
            CallFailed: if the environment cannot be loaded there.
        """
        try:
            return RemoteEnvironment(self.domain.args, await self.workers.fork())
        except LoadRefused as error:
            raise CallFailed(str(error)) from None

    def _setup(self, preload: bool) -> msgspec.Struct:
        section = self.domain.section.model_dump(mode="json")
        return protocol.SetupDomain(self.domain.name, section, self._memory_mib, preload)

    def _launch(self, theirs: socket.socket, output: IO[bytes]) -> subprocess.Popen[bytes]:
        launch = partial(
            start,
            "envhub.workers.forkserver",
            theirs,
            output,
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


class WorkerPools:
    """The worker pools of a hub's domains.

    Args:
        memory_mib: limit of each environment, beyond what its process starts with; None: no limit.
        passed: environment variables that they get besides the harmless ones and those that a
            domain refers to.
        num_envs: environments of one process.
    """

    def __init__(
        self, memory_mib: int | None, passed: Sequence[str] = (), num_envs: int = 1
    ) -> None:
        self._memory_mib = memory_mib
        self._num_envs = num_envs
        self.passed = passed
        self._pools: dict[str, WorkerPool] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._closed_died = 0
        self._closed_cpu_s = 0.0

    @property
    def living(self) -> int:
        """Worker processes at present."""
        return sum(len(pool.workers.living) for pool in self._pools.values())

    @property
    def num_died(self) -> int:
        """Worker processes that exited by themselves or were killed for their memory, so far."""
        return self._closed_died + sum(pool.workers.num_died for pool in self._pools.values())

    def cpu_s(self) -> float:
        """Return the CPU seconds of all worker processes so far."""
        return self._closed_cpu_s + sum(pool.workers.cpu_s() for pool in self._pools.values())

    async def environment(self, domain: Domain) -> RemoteEnvironment:
        """Return a new environment, as ``WorkerPool.environment``."""
        pool = self._pools.get(domain.name)
        if pool is None or pool.domain != domain:
            if pool is not None:
                self._replace(pool)
            pool = self._pools[domain.name] = WorkerPool(
                domain, self._memory_mib, self.passed, self._num_envs
            )
        return await pool.environment()

    async def close(self) -> None:
        """End all worker processes."""
        await asyncio.gather(
            *(pool.workers.close() for pool in self._pools.values()), *self._closing
        )

    def _replace(self, pool: WorkerPool) -> None:
        """Close the pool of a domain with new settings once its old episodes have ended."""
        task = asyncio.create_task(self._outlive(pool))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _outlive(self, pool: WorkerPool) -> None:
        try:
            # polled, as a set has no event and new settings are rare
            while pool.workers.living or pool.workers.num_forking:  # noqa: ASYNC110
                await asyncio.sleep(1.0)
        finally:
            self._closed_died += pool.workers.num_died
            self._closed_cpu_s += pool.workers.cpu_s()
            await pool.workers.close()
