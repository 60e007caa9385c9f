"""Worker processes that may be killed: a reward that hangs or crashes costs one process, which is replaced."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import psutil

from broker.children import spawn
from broker.config import Reward
from broker.errors import RlearnerError, UserError
from rewardhub import protocol
from rewardhub.rewards.base import Sample, Value

log = logging.getLogger(__name__)

START_S: Final = 60.0  # for a worker to import its rewards


class ScoreFailed(RlearnerError):
    """No score. ``retry``: another try may go better."""

    def __init__(self, detail: str, *, retry: bool) -> None:
        super().__init__(detail)
        self.retry = retry


class NoWorker(RlearnerError):
    """No worker process can be started on this machine now; nobody's fault but the machine's."""


class _Died(RlearnerError):
    """The worker hung up or said something unintelligible."""


class Worker:
    """One child process and the socket to it."""

    def __init__(self, child: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.child, self._reader, self._writer = child, reader, writer

    @classmethod
    async def start(cls) -> Worker:
        """Start a process.

        Raises:
            OSError: it cannot be started.
        """
        ours, theirs = socket.socketpair()
        try:
            command = (sys.executable, "-m", "rewardhub.worker", str(theirs.fileno()))
            env = {**os.environ, "OMP_NUM_THREADS": "1"}
            with theirs:
                child = await asyncio.to_thread(spawn, command, sys.stderr.buffer, pass_fds=(theirs.fileno(),), env=env)
        except BaseException:
            ours.close()
            raise
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        return cls(child, reader, writer)

    async def ask(self, request: protocol.Load | protocol.Score, timeout_s: float) -> protocol.Done | protocol.Failed:
        """One question, one answer.

        Raises:
            TimeoutError: no answer in time; the worker is of no use any more.
            _Died: neither is this one.
        """
        try:
            async with asyncio.timeout(timeout_s):
                self._writer.write(protocol.frame(request))
                await self._writer.drain()
                (size,) = protocol.HEADER.unpack(await self._reader.readexactly(protocol.HEADER.size))
                return protocol.answer(await self._reader.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionError):
            raise _Died(f"the worker process died{await self._how()}") from None
        except msgspec.DecodeError as error:
            raise _Died(f"the worker process answered something unintelligible: {error}") from None

    async def _how(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = await asyncio.to_thread(self.child.wait, 1.0)
            return f" by {signal.Signals(-code).name}" if code < 0 else f" with exit code {code}"
        return ""

    async def kill(self) -> None:
        """End it and whatever it started."""
        self._writer.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.child.pid, signal.SIGKILL)  # it leads a session of its own
        await asyncio.to_thread(self.child.wait)


class Workers:
    """A fixed number of workers, each scoring one sample at a time.

    Args:
        num_workers: processes.
        timeout_s: for one score; a worker that takes longer is killed.
        rewards: made ready in every worker before it serves.
    """

    def __init__(self, num_workers: int, timeout_s: float, rewards: Sequence[Reward]) -> None:
        self._timeout_s, self._rewards = timeout_s, list(rewards)
        self._free: asyncio.LifoQueue[Worker | None] = asyncio.LifoQueue()  # None: a worker that is yet to be started
        for _ in range(num_workers):
            self._free.put_nowait(None)
        self._living: set[Worker] = set()
        self._buried_cpu_s = 0.0
        self.num_killed = 0  # after a timeout or a crash
        self.num_busy = 0

    async def start(self) -> None:
        """Start all of them.

        Raises:
            UserError: a reward cannot be loaded here, or no process can be started.
        """
        places = [self._free.get_nowait() for _ in range(self._free.qsize())]
        started = await asyncio.gather(*(self._start_one() for _ in places), return_exceptions=True)
        for worker in started:
            self._free.put_nowait(worker if isinstance(worker, Worker) else None)
        for error in started:
            if isinstance(error, (NoWorker, ScoreFailed)):
                raise UserError(str(error))
            if isinstance(error, BaseException):
                raise error

    async def score(self, reward: Reward, sample: Sample) -> Value:
        """The reward of one sample, from the next free worker.

        Raises:
            ScoreFailed: the reward raised, took too long, crashed its process, or answered something that is no number.
            NoWorker: no process can be started here now.
        """
        worker = await self._free.get()
        self.num_busy += 1
        try:
            worker = worker or await self._start_one()
            healthy = worker
            worker = None  # until it has answered
            try:
                answer = await healthy.ask(protocol.Score(reward.name, reward.args, sample), self._timeout_s)
            except TimeoutError:
                self.num_killed += 1
                await self._bury(healthy)
                raise ScoreFailed(f"{reward.name}: no score within {self._timeout_s:g} s", retry=True) from None
            except _Died as error:
                self.num_killed += 1
                await self._bury(healthy)
                raise ScoreFailed(f"{reward.name}: {error}", retry=True) from None
            except asyncio.CancelledError:
                await self._bury(healthy)  # it is still at work on what nobody wants
                raise
            worker = healthy
        finally:
            self.num_busy -= 1
            self._free.put_nowait(worker)
        return _value(answer)

    async def close(self) -> None:
        """End all of them at once."""
        await asyncio.gather(*(self._bury(worker) for worker in list(self._living)))

    def cpu_s(self) -> float:
        """CPU seconds of all workers so far, those that are gone included."""
        return self._buried_cpu_s + sum(_cpu_s(worker.child.pid) for worker in self._living)

    async def _start_one(self) -> Worker:
        try:
            worker = await Worker.start()
        except OSError as error:
            raise NoWorker(f"no worker process can be started: {error}") from None
        self._living.add(worker)
        try:
            for reward in self._rewards:
                answer = await worker.ask(protocol.Load(reward.name, reward.args), START_S)
                if isinstance(answer, protocol.Failed):
                    raise ScoreFailed(answer.detail, retry=answer.retry)
        except (TimeoutError, _Died) as error:
            await self._bury(worker)
            raise NoWorker(f"a worker process does not start: {error or f'nothing within {START_S:g} s'}") from None
        except BaseException:
            await self._bury(worker)
            raise
        return worker

    async def _bury(self, worker: Worker) -> None:
        self._living.discard(worker)
        self._buried_cpu_s += _cpu_s(worker.child.pid)
        await worker.kill()


def _value(answer: protocol.Done | protocol.Failed) -> Value:
    if isinstance(answer, protocol.Failed):
        raise ScoreFailed(answer.detail, retry=answer.retry)
    if answer.value is None:
        raise ScoreFailed("the worker process answered without a value", retry=True)
    return answer.value


def _cpu_s(pid: int) -> float:
    try:
        times: Any = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)
