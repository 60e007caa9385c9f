"""Forks one domain's worker processes, limits their memory, and reaps them.

``envhub.workers.worker_pool`` starts it. It imports the environment once and then forks: a worker
starts within milliseconds and shares what was loaded, so hundreds of environments can have a
process each. As their parent it alone reaps the workers, so no process id is reused too early.
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
# from the end of a worker's socket to that of its process
LAST_BREATH_S: Final = 0.5


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
            wait_s = None
            if self._living and self._setup.memory_mib is not None:
                wait_s = self._watch()
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
                return self._reap(pid, hung_up)
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
            # a session of its own, so that its descendants can be killed with it
            os.setsid()
            die_with(parent, signal.SIGKILL)
            # not the forkserver's handler
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            # only the forkserver talks to the hub
            self._control.close()
            if (numpy := sys.modules.get("numpy")) is not None:
                # else the global generator would draw the same in all workers
                numpy.random.seed()
            limits.be_expendable()
            allowance = limits.ResourceLimits(self._setup.memory_mib)
            worker.serve(self._domain or self._load(), connection, allowance)
            code = 0
        except BaseException:  # noqa: BLE001 - must never return into the forkserver's loop
            sys.excepthook(*sys.exc_info())
        finally:
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.flush()
            # no exit handlers, which are the forkserver's
            os._exit(code)

    def _reap(self, pid: int, hung_up: bool) -> protocol.WorkerReaped:
        cause = self._killed.pop(pid, "")
        if hung_up and not cause:
            cause = _describe_exit(pid)
        limits.kill_tree(pid)
        _, _, usage = os.wait4(pid, 0)
        self._living.discard(pid)
        return protocol.WorkerReaped(cause, usage.ru_utime + usage.ru_stime)

    def _watch(self) -> float:
        """Kill workers over their memory limit. Return the seconds until the next check."""
        if (left_s := self._watched + WATCH_EVERY_S - time.monotonic()) > 0:
            return left_s
        limit_mib = self._setup.memory_mib
        assert limit_mib is not None
        for pid in self._living - self._killed.keys():
            used_mib = limits.resident_mib(limits.tree(pid)) - self._base_mib
            if used_mib > limit_mib:
                self._killed[pid] = limits.too_much(used_mib, limit_mib)
                limits.kill_tree(pid)
        self._watched = time.monotonic()
        return WATCH_EVERY_S


def _describe_exit(pid: int) -> str:
    """Return how a worker ended that has closed its socket, without reaping it."""
    until = time.monotonic() + LAST_BREATH_S
    while (status := os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is None:
        if time.monotonic() > until:
            return "closed its socket"
        time.sleep(0.002)
    has_exited = status.si_code == os.CLD_EXITED
    return limits.how_ended(status.si_status if has_exited else -status.si_status)


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


def _exit_quietly(number: int, frame: FrameType | None) -> None:
    raise SystemExit(0)


def main(control: socket.socket) -> None:
    """Serve the hub at the other end of ``control``."""
    setup, _ = receive(control)
    if not isinstance(setup, protocol.SetupDomain):
        return
    try:
        forkserver = DomainForkserver(control, setup)
    except UserError as error:
        send(control, protocol.RequestRefused(str(error)))
        return
    # SIGTERM: the hub exited. Set last, as the environment's module may set a handler, too.
    signal.signal(signal.SIGTERM, _exit_quietly)
    gc.collect()
    # so that collections in the workers do not write to, and so copy, shared memory
    gc.freeze()
    try:
        send(control, protocol.ForkserverReady(len(os.listdir("/proc/self/task"))))
        forkserver.serve()
    finally:
        forkserver.end()


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
