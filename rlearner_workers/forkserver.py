"""The process that loads something once and forks workers that share it.

``rlearner_workers.forked_workers`` starts it. A worker starts within milliseconds and shares what
was loaded, so hundreds can have a process each. As their parent it alone reaps the workers, so no
process id is reused too early. A fork copies one thread only, so it has no other.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, Final, NoReturn

import msgspec
from msgspec.msgpack import Decoder, Encoder

from broker.system.children import die_with
from broker.system.process_tree import kill_tree, process_tree, resident_mib
from rlearner_workers import frames, limits

WATCH_EVERY_S: Final = 0.5
# from the end of a worker's socket to that of its process
LAST_BREATH_S: Final = 0.5
MAX_LINKS: Final = 64  # of one worker


class ForkserverReady(msgspec.Struct, frozen=True, tag=True):
    """Workers can be forked. A process with several threads should not be."""

    num_threads: int


class ForkWorker(msgspec.Struct, frozen=True, tag=True):
    """Start a worker that serves the sockets sent with this, each in a thread of its own; answered
    by WorkerForked or RequestRefused.
    """


class WorkerForked(msgspec.Struct, frozen=True, tag=True):
    """The worker has started."""

    pid: int


class ReapWorker(msgspec.Struct, frozen=True, tag=True):
    """Kill a worker and its descendants; answered by WorkerReaped."""

    pid: int
    hung_up: bool  # it closed its socket, which means that it is about to exit


class WorkerReaped(msgspec.Struct, frozen=True, tag=True):
    """The worker has ended."""

    how: str  # how it exited by itself, or why it was killed before; empty: killed by this request
    cpu_s: float  # user and system seconds, its children's included


class RequestRefused(msgspec.Struct, frozen=True, tag=True):
    """The request failed."""

    detail: str


Order = ForkWorker | ReapWorker
Report = ForkserverReady | WorkerForked | WorkerReaped | RequestRefused

ENCODER: Final = Encoder()
ORDERS: Final[Decoder[Order]] = Decoder(Order)
REPORTS: Final[Decoder[Report]] = Decoder(Report)


class Forkserver:
    """The workers of one forkserver.

    Args:
        control: the socket to the parent.
        serve_worker: serves one socket to the parent until that closes it; gets its limits, too.
        memory_mib: of a worker and its descendants, beyond what is loaded now; None: no limit.
    """

    def __init__(
        self,
        control: socket.socket,
        serve_worker: Callable[[socket.socket, limits.ResourceLimits], None],
        memory_mib: int | None,
    ) -> None:
        self._control = control
        self._serve_worker = serve_worker
        self._memory_mib = memory_mib
        self._base_mib = resident_mib([os.getpid()])
        self._living: set[int] = set()
        self._killed: dict[int, str] = {}  # over their memory limit, until they are reaped
        self._watched = time.monotonic()

    def run(self) -> None:
        """Serve requests until the parent closes the socket or sends SIGTERM; then kill every
        worker and its descendants.
        """
        # SIGTERM: the parent exited. Set now, as what was loaded may have set a handler, too.
        signal.signal(signal.SIGTERM, _exit_quietly)
        gc.collect()
        # so that collections in the workers do not write to, and so copy, shared memory
        gc.freeze()
        try:
            send_report(self._control, ForkserverReady(len(os.listdir("/proc/self/task"))))
            while self._serve_next():
                pass
        finally:
            for pid in self._living:
                kill_tree(pid)

    def _serve_next(self) -> bool:
        """Serve a request, or watch the workers; return False once the parent has hung up."""
        wait_s = None
        if self._living and self._memory_mib is not None:
            wait_s = self._watch(self._memory_mib)
        if not select.select([self._control], [], [], wait_s)[0]:
            return True
        header, fds, _, _ = socket.recv_fds(self._control, frames.HEADER_BYTES, MAX_LINKS)
        connections = [socket.socket(fileno=fd) for fd in fds]
        if len(header) < frames.HEADER_BYTES:
            return False
        data = frames.read_exactly(self._control.fileno(), frames.frame_size(header))
        if data is None:
            return False
        send_report(self._control, self._obey(ORDERS.decode(data), connections))
        return True

    def _obey(self, order: Order, connections: Sequence[socket.socket]) -> Report:
        match order:
            case ForkWorker() if connections:
                try:
                    return self._fork(connections)
                finally:
                    for connection in connections:
                        connection.close()
            case ReapWorker(pid, hung_up) if pid in self._living:
                return self._reap(pid, hung_up)
            case _:
                return RequestRefused(f"{type(order).__name__} is not for now")

    def _fork(self, connections: Sequence[socket.socket]) -> WorkerForked | RequestRefused:
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            return RequestRefused(f"no process can be forked: {error.strerror}")
        if pid == 0:
            self._become_worker(parent, connections)
        self._living.add(pid)
        return WorkerForked(pid)

    def _become_worker(self, parent: int, connections: Sequence[socket.socket]) -> NoReturn:
        code = 1
        try:
            # a session of its own, so that its descendants can be killed with it
            os.setsid()
            die_with(parent, signal.SIGKILL)
            # not the forkserver's handler
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            # only the forkserver talks to the parent
            self._control.close()
            if (numpy := sys.modules.get("numpy")) is not None:
                # else the global generator would draw the same in all workers
                numpy.random.seed()
            limits.be_expendable()
            self._serve_links(connections, limits.ResourceLimits(self._memory_mib))
            code = 0
        except BaseException:  # noqa: BLE001 - must never return into the forkserver's loop
            sys.excepthook(*sys.exc_info())
        finally:
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.flush()
            # no exit handlers, which are the forkserver's
            os._exit(code)

    def _serve_links(
        self, connections: Sequence[socket.socket], allowance: limits.ResourceLimits
    ) -> None:
        first, *others = connections
        threads = [
            threading.Thread(target=self._serve_worker, args=(connection, allowance), daemon=True)
            for connection in others
        ]
        for thread in threads:
            thread.start()
        self._serve_worker(first, allowance)
        for thread in threads:
            thread.join()

    def _reap(self, pid: int, hung_up: bool) -> WorkerReaped:
        cause = self._killed.pop(pid, "")
        if hung_up and not cause:
            cause = _describe_exit(pid)
        kill_tree(pid)
        _, _, usage = os.wait4(pid, 0)
        self._living.discard(pid)
        return WorkerReaped(cause, usage.ru_utime + usage.ru_stime)

    def _watch(self, limit_mib: int) -> float:
        """Kill workers over their memory limit. Return the seconds until the next check."""
        if (left_s := self._watched + WATCH_EVERY_S - time.monotonic()) > 0:
            return left_s
        for pid in self._living - self._killed.keys():
            used_mib = resident_mib(process_tree(pid)) - self._base_mib
            if used_mib > limit_mib:
                self._killed[pid] = limits.too_much(used_mib, limit_mib)
                kill_tree(pid)
        self._watched = time.monotonic()
        return WATCH_EVERY_S


def send_report(control: socket.socket, report: Any) -> None:
    """Answer the parent."""
    control.sendall(frames.pack_frame(ENCODER.encode(report)))


def _describe_exit(pid: int) -> str:
    """Return how a worker ended that has closed its socket, without reaping it."""
    until = time.monotonic() + LAST_BREATH_S
    while (status := os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is None:
        if time.monotonic() > until:
            return "closed its socket"
        time.sleep(0.002)
    has_exited = status.si_code == os.CLD_EXITED
    return limits.how_ended(status.si_status if has_exited else -status.si_status)


def _exit_quietly(number: int, frame: FrameType | None) -> None:
    raise SystemExit(0)
