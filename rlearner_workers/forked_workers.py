"""Workers that one prepared process forks, as their parent sees them."""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO, Any, Final, Generic, TypeVar

import msgspec
from msgspec.msgpack import Decoder

from broker.errors import RlearnerError, reason_of
from broker.system.children import cpu_s
from broker.system.process_tree import process_tree
from rlearner_workers import forkserver
from rlearner_workers.frames import MAX_ANSWER_BYTES, FrameTooLong, pack_frame, read_frame
from rlearner_workers.link import MessageLink
from rlearner_workers.output import WorkerOutput
from rlearner_workers.patience import OutOfTime, wait_for_bytes
from rlearner_workers.start import start_with_socket

log = logging.getLogger(__name__)

# All on the forkserver's own clock: a loaded machine must not end it, and all its workers with it.
# to load what the workers share; doubled after each failure
START_S: Final = 60.0
LONGEST_START_S: Final = 960.0
ORDER_S: Final = 10.0

Answer = TypeVar("Answer")


class NoWorker(RlearnerError):
    """No worker process can be started on this machine at present; the machine is to blame."""


class LoadRefused(RlearnerError):
    """The forkserver cannot load what the workers share; says why."""


@dataclass(frozen=True)
class ForkserverKind:
    """What a forkserver is.

    Attributes:
        name: of its workers, for the log.
        content: what it loads, for the log.
        launch: starts it with its end of a socket and the pipe for its output; in a thread.
        setup: its first message, which says what to load; argument: whether to load it once before
            it forks, else each worker loads it.
    """

    name: str
    content: str
    launch: Callable[[socket.socket, IO[bytes]], subprocess.Popen[bytes]]
    setup: Callable[[bool], msgspec.Struct]


class ForkedWorkers(Generic[Answer]):
    """The workers of one forkserver, which starts with the first of them.

    Args:
        answers: decodes what the workers send.
        links_per_worker: leases of one worker, which ends with the last of them.

    Attributes:
        living: workers that are not reaped, by process id.
        num_forking: those that are about to start.
        num_died: those that exited by themselves or were killed for their memory.
    """

    def __init__(
        self, kind: ForkserverKind, answers: Decoder[Answer], links_per_worker: int = 1
    ) -> None:
        self._kind = kind
        self._answers = answers
        self._links_per_worker = links_per_worker
        self._spare: list[ForkedWorker[Answer]] = []
        self._num_leased: dict[int, int] = {}  # by process id
        self.living: set[int] = set()
        self.num_died = self.num_forking = 0
        self._reaped_cpu_s = 0.0
        self._forkserver: tuple[subprocess.Popen[bytes], socket.socket] | None = None
        self._output = WorkerOutput(kind.name)
        self._start_s = START_S
        # One request at a time, and no second forkserver while one starts.
        self._lock = asyncio.Lock()
        self._reaping: dict[int, asyncio.Task[str]] = {}
        self._discarding: set[asyncio.Task[None]] = set()

    @property
    def forkserver_pid(self) -> int:
        """Of the process that forks; 0: none runs."""
        return self._forkserver[0].pid if self._forkserver else 0

    async def fork(self) -> ForkedWorker[Answer]:
        """Return a new worker.

        Raises:
            NoWorker: if no process can be started.
            LoadRefused: if the forkserver cannot load what the workers share.
        """
        forking = asyncio.create_task(self._fork())
        self.num_forking += 1
        forking.add_done_callback(self._count_forked)
        try:
            # a fork under way cannot be taken back, so its worker is reaped later
            return await asyncio.shield(forking)
        except asyncio.CancelledError:
            forking.add_done_callback(self._discard)
            raise

    def _count_forked(self, _: asyncio.Task[ForkedWorker[Answer]]) -> None:
        self.num_forking -= 1

    def _discard(self, forking: asyncio.Task[ForkedWorker[Answer]]) -> None:
        """End a worker whose caller was cancelled before it started."""
        if not forking.cancelled() and forking.exception() is None:
            task = asyncio.create_task(forking.result().close())
            self._discarding.add(task)
            task.add_done_callback(self._discarding.discard)

    async def _fork(self) -> ForkedWorker[Answer]:
        async with self._lock:
            if not self._spare:
                self._spare = await self._fork_worker()
            worker = self._spare.pop()
            self._num_leased[worker.pid] = self._num_leased.get(worker.pid, 0) + 1
            return worker

    async def _fork_worker(self) -> list[ForkedWorker[Answer]]:
        """Return all leases of a new worker."""
        pairs = [socket.socketpair() for _ in range(self._links_per_worker)]
        try:
            if self._forkserver is None:
                await self._start()
            forked = await self._order(
                forkserver.ForkWorker(), passed_sockets=[theirs for _, theirs in pairs]
            )
            if not isinstance(forked, forkserver.WorkerForked):
                unexpected = "the process that forks workers sent an unexpected answer"
                raise NoWorker(getattr(forked, "detail", unexpected))
        except BaseException as error:
            for ours, _ in pairs:
                ours.close()
            if isinstance(error, OSError | OutOfTime | msgspec.DecodeError):
                self._forget_forkserver()
                reason = f"no worker process can be started: {reason_of(error)}"
                raise NoWorker(reason) from None
            raise
        finally:
            for _, theirs in pairs:
                theirs.close()
        self.living.add(forked.pid)
        return [
            ForkedWorker(
                self,
                forked.pid,
                await MessageLink.open(ours, self._answers, MAX_ANSWER_BYTES),
            )
            for ours, _ in pairs
        ]

    async def give_back(self, worker: ForkedWorker[Answer], *, is_lost: bool) -> None:
        """End a lease, and its worker if it is lost or this was the last lease."""
        if worker.pid in self._num_leased:
            self._num_leased[worker.pid] -= 1
        if is_lost or not self._num_leased.get(worker.pid):
            await self.reap(worker.pid, hung_up=False)

    async def reap(self, pid: int, *, hung_up: bool) -> str:
        """Kill a worker, once. Return how it ended, if by itself."""
        if pid not in self._reaping and pid in self.living:
            self._num_leased.pop(pid, None)
            self._drop_spares(pid)
            self._reaping[pid] = asyncio.create_task(self._reap(pid, hung_up))
        task = self._reaping.get(pid)
        if task is None:
            return "died"
        return await asyncio.shield(task)

    def _drop_spares(self, pid: int) -> None:
        for spare in [spare for spare in self._spare if spare.pid == pid]:
            self._spare.remove(spare)
            spare.link.close()

    async def _reap(self, pid: int, hung_up: bool) -> str:
        cause = "died"
        try:
            async with self._lock:
                if self._forkserver is not None:
                    limit_s = ORDER_S + forkserver.LAST_BREATH_S
                    report = await self._order(forkserver.ReapWorker(pid, hung_up), limit_s)
                    if isinstance(report, forkserver.WorkerReaped):
                        self._reaped_cpu_s += report.cpu_s
                        self.num_died += bool(report.how)
                        cause = report.how or cause
        except (OSError, OutOfTime, msgspec.DecodeError) as error:
            reason = reason_of(error)
            log.warning("%s: the forkserver and its workers are gone (%s)", self._kind.name, reason)
            self._forget_forkserver()
        # also if that failed: workers end with their forkserver
        self.living.discard(pid)
        self._reaping.pop(pid, None)
        return cause

    async def close(self) -> None:
        """End all processes at once."""
        async with self._lock:
            self._forget_forkserver()
        self._output.close()

    def cpu_s(self) -> float:
        """Return the CPU seconds of all workers so far."""
        # in a sandbox, workers have other pids there
        pids = process_tree(self.forkserver_pid) if self._forkserver else []
        return self._reaped_cpu_s + sum(map(cpu_s, pids))

    async def _start(self) -> None:
        # a fork copies one thread only, so code that starts threads is not loaded before
        for preload in (True, False):
            ready = await self._prepare(preload)
            if isinstance(ready, forkserver.RequestRefused):
                self._forget_forkserver()
                raise LoadRefused(ready.detail)
            if isinstance(ready, forkserver.ForkserverReady) and (
                ready.num_threads == 1 or not preload
            ):
                return
            log.warning(
                "%s starts threads when it is imported, so each worker imports it for itself",
                self._kind.content,
            )
            self._forget_forkserver()

    async def _prepare(self, preload: bool) -> Any:
        self._forkserver = await start_with_socket(
            lambda theirs: self._kind.launch(theirs, self._output.file)
        )
        try:
            ready = await self._order(
                self._kind.setup(preload), self._start_s, name=f"importing {self._kind.content}"
            )
        except OutOfTime:
            self._start_s = min(2.0 * self._start_s, LONGEST_START_S)
            raise
        self._start_s = START_S
        return ready

    async def _order(
        self,
        order: msgspec.Struct,
        limit_s: float = ORDER_S,
        *,
        passed_sockets: Sequence[socket.socket] = (),
        name: str = "",
    ) -> Any:
        if self._forkserver is None:
            raise ConnectionResetError("the process that forks workers ended")
        return await asyncio.to_thread(
            _send_order, *self._forkserver, order, limit_s, passed_sockets=passed_sockets, name=name
        )

    def _forget_forkserver(self) -> None:
        """End the process that forks workers; they exit with it."""
        if self._forkserver is None:
            return
        for spare in self._spare:
            spare.link.close()
        self._spare.clear()
        child, ours = self._forkserver
        self._forkserver = None
        ours.close()
        child.terminate()


@dataclass(frozen=True, eq=False)
class ForkedWorker(Generic[Answer]):
    """One lease of a worker, and the link to it."""

    workers: ForkedWorkers[Answer]
    pid: int
    link: MessageLink[Answer]

    async def reap(self) -> str:
        """Reap it once it has closed the link; return how it ended."""
        return await self.workers.reap(self.pid, hung_up=True)

    async def close(self, *, is_lost: bool = False) -> None:
        """Close the link, and end the worker after its last one.

        Args:
            is_lost: whether it may not have answered, so that it ends at once.
        """
        self.link.close()
        await self.workers.give_back(self, is_lost=is_lost)


def _send_order(
    child: subprocess.Popen[bytes],
    control: socket.socket,
    order: msgspec.Struct,
    limit_s: float,
    *,
    passed_sockets: Sequence[socket.socket] = (),
    name: str = "",
) -> Any:
    """Send a request and return its reply; blocks.

    Args:
        limit_s: until the reply begins, on the clock of the forkserver and its workers.
        passed_sockets: sent along.
        name: of the work, to log that it is slow.

    Raises:
        OSError: if the other end is gone.
        OutOfTime: if it does not reply in time.
        msgspec.DecodeError: if the reply is malformed.
    """
    data = pack_frame(forkserver.ENCODER.encode(order))
    fds = [passed_socket.fileno() for passed_socket in passed_sockets]
    num_sent = socket.send_fds(control, [data], fds)
    control.sendall(data[num_sent:])
    wait_for_bytes(control, child.pid, limit_s, name)
    try:
        reply = read_frame(control.fileno(), MAX_ANSWER_BYTES)
    except FrameTooLong as error:
        raise OSError(f"its reply has {error}") from None
    if reply is None:
        raise ConnectionResetError("the process that forks workers ended")
    return forkserver.REPORTS.decode(reply)
