"""Forks one domain's worker processes, limits their memory, and reaps them.

``envhub.workers.worker_pool`` starts it. It imports the environment once and then forks: a worker
starts within milliseconds and shares what was loaded, so hundreds of environments can have a
process each. It is the parent of its workers and alone reaps them, so no process id can be reused
before its worker is reaped.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket
import sys
import time
from types import FrameType
from typing import Any, Final, NoReturn

from broker.errors import UserError
from broker.settings.config import DomainSection
from broker.system.children import die_with
from broker.system.workers import limits, line
from envhub.domain import Domain, load_domain
from envhub.workers import protocol, worker

WATCH_EVERY_S: Final = 0.5
LAST_BREATH_S: Final = 0.5  # between the end of a worker's socket and the end of its process


class DomainForkserver:
    """One domain's workers."""

    def __init__(self, control: socket.socket, setup: protocol.SetupDomain) -> None:
        self._control = control
        self._setup = setup
        self._domain: Domain | None = self._load() if setup.preload else None
        self._base_mib = limits.resident_mib([os.getpid()])
        self._living: set[int] = set()
        self._killed: dict[int, str] = {}  # over their memory limit, until they are reaped
        self._watched = time.monotonic()

    def _load(self) -> Domain:
        """Return the domain, its class imported, its arguments and data files checked and read."""
        domain = load_domain(self._setup.name, DomainSection.model_validate(self._setup.section))
        domain.check()
        return domain

    def serve(self) -> None:
        """Serve requests until the hub hangs up."""
        while True:
            wait_s = None if not self._living or self._setup.memory_mib is None else self._watch()
            if not select.select([self._control], [], [], wait_s)[0]:
                continue
            order, connection = receive(self._control)
            if order is None:
                return
            send(self._control, self._obey(order, connection))

    def end(self) -> None:
        """Kill every worker and its descendants."""
        for pid in self._living:
            limits.kill_tree(pid)

    def _obey(self, order: Any, connection: socket.socket | None) -> Any:
        match order:
            case protocol.ForkWorker() if connection is not None:
                with connection:
                    return self._fork(connection)
            case protocol.ReapWorker(pid, hung_up) if pid in self._living:
                return self._bury(pid, hung_up)
            case _:
                return protocol.RequestRefused(f"{type(order).__name__} is not for now")

    def _fork(self, connection: socket.socket) -> protocol.WorkerForked | protocol.RequestRefused:
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            return protocol.RequestRefused(f"no process can be forked: {error.strerror}")
        if pid == 0:
            self._become_worker(parent, connection)
        self._living.add(pid)
        return protocol.WorkerForked(pid)

    def _become_worker(self, parent: int, connection: socket.socket) -> NoReturn:
        code = 1
        try:
            os.setsid()
            die_with(parent, signal.SIGKILL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self._control.close()
            if (numpy := sys.modules.get("numpy")) is not None:
                numpy.random.seed()  # else the global generator would draw the same in all workers
            limits.be_expendable()
            allowance = limits.ResourceLimits(self._setup.memory_mib)
            worker.serve(self._domain or self._load(), connection, allowance)
            code = 0
        except BaseException:  # noqa: BLE001 - must never return into the forkserver's loop
            sys.excepthook(*sys.exc_info())
        finally:
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.flush()
            os._exit(code)

    def _bury(self, pid: int, hung_up: bool) -> protocol.WorkerReaped:
        cause = self._killed.pop(pid, "")
        if hung_up and not cause:
            cause = _own_end(pid)
        limits.kill_tree(pid)
        _, _, usage = os.wait4(pid, 0)
        self._living.discard(pid)
        return protocol.WorkerReaped(cause, usage.ru_utime + usage.ru_stime)

    def _watch(self) -> float:
        """Kill workers over their memory limit. Return the seconds until the next check."""
        if (left_s := self._watched + WATCH_EVERY_S - time.monotonic()) > 0:
            return left_s
        most = self._setup.memory_mib
        assert most is not None
        for pid in self._living - self._killed.keys():
            used_mib = limits.resident_mib(limits.tree(pid)) - self._base_mib
            if used_mib > most:
                self._killed[pid] = limits.too_much(used_mib, most)
                limits.kill_tree(pid)
        self._watched = time.monotonic()
        return WATCH_EVERY_S


def _own_end(pid: int) -> str:
    """Return how a worker ended that has closed its socket, without reaping it."""
    until = time.monotonic() + LAST_BREATH_S
    while (end := os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is None:
        if time.monotonic() > until:
            return "closed its socket"
        time.sleep(0.002)
    return limits.how_ended(end.si_status if end.si_code == os.CLD_EXITED else -end.si_status)


def receive(control: socket.socket) -> tuple[Any, socket.socket | None]:
    """Receive a request and the socket sent with it; (None, None) once the hub has hung up."""
    header, fds, _, _ = socket.recv_fds(control, line.HEADER.size, 1)
    if len(header) < line.HEADER.size:
        return None, None
    connection = socket.socket(fileno=fds[0]) if fds else None
    (size,) = line.HEADER.unpack(header)
    data = bytearray()
    while len(data) < size:
        if not (more := control.recv(size - len(data))):
            return None, None
        data += more
    return protocol.ORDERS.decode(data), connection


def send(control: socket.socket, report: Any) -> None:
    """Send a reply."""
    control.sendall(line.frame(protocol.ENCODER.encode(report)))


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(0)


def main(control: socket.socket) -> None:
    """Serve the hub at the other end of ``control``."""
    setup, _ = receive(control)
    if not isinstance(setup, protocol.SetupDomain):
        return
    try:
        zygote = DomainForkserver(control, setup)
    except UserError as error:
        send(control, protocol.RequestRefused(str(error)))
        return
    # the hub exited; set last, as the environment's module may set it too
    signal.signal(signal.SIGTERM, _leave)
    gc.collect()
    gc.freeze()  # so that collections in the workers do not write to, and so copy, shared memory
    try:
        send(control, protocol.ForkserverReady(len(os.listdir("/proc/self/task"))))
        zygote.serve()
    finally:
        zygote.end()


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
