"""The process that makes sandboxes: it forks their first processes, and what runs in them.

It is small and has one thread, so that a fork costs a millisecond or two. It ends with the process
that started it, however that ends, and everything in its sandboxes ends with it.
"""

from __future__ import annotations

import codecs
import gc
import json
import os
import resource
import select
import signal
import socket
import sys
from collections.abc import Callable
from typing import Final

from rlearner_sandbox.providers.namespace import first, inside, syscalls
from rlearner_sandbox.providers.namespace.plan import (
    FIRST_UID,
    MAX_PACKET,
    NUM_UIDS,
    EndPlan,
    Plan,
    RunPlan,
    StartPlan,
    TaskPlan,
    decode_plan,
)

MAX_FDS: Final = 8
_SPACES: Final = (
    syscalls.NEWUSER | syscalls.NEWNS | syscalls.NEWPID | syscalls.NEWIPC | syscalls.NEWUTS
    | syscalls.NEWCGROUP
)  # fmt: skip
# The user namespace gives the right to enter the others.
_SPACE_NAMES: Final = ("user", "mnt", "pid", "ipc", "uts", "cgroup")


class Warden:
    """Answers the plans of the provider at the other end of ``channel``.

    Args:
        call_filter: the filter on system calls of commands.
    """

    def __init__(self, channel: socket.socket, call_filter: bytes) -> None:
        self._channel = channel
        self._filter = call_filter
        self._pidfds: dict[int, int] = {}  # by key
        self._spaces: dict[int, list[int]] = {}  # its namespaces' descriptors, by key
        self._keys: dict[int, int] = {}  # by pid of a first process

    def serve(self) -> None:
        """Work until the other end is closed."""
        wakeups, wakeup = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        ready = select.poll()
        ready.register(self._channel, select.POLLIN)
        ready.register(wakeups, select.POLLIN)
        while True:
            fds = {fd for fd, _ in ready.poll()}
            if wakeups in fds:
                os.read(wakeups, 4096)
            self._reap_children()
            if self._channel.fileno() in fds and not self._serve_request():
                return

    def _serve_request(self) -> bool:
        packet, fds, _, _ = socket.recv_fds(self._channel, MAX_PACKET, MAX_FDS)
        if not packet:
            return False
        plan = decode_plan(packet)
        try:
            self._follow_plan(plan, fds)
        except OSError as error:
            if fds:
                control = socket.socket(fileno=fds.pop(0))
                _send_result(control, {"error": str(error)})
                control.close()
        for fd in fds:
            os.close(fd)
        return True

    def _follow_plan(self, plan: Plan, fds: list[int]) -> None:
        if isinstance(plan, EndPlan):
            pidfd = self._pidfds.get(plan.key)
            if pidfd is not None:
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        elif isinstance(plan, StartPlan):
            self._start_sandbox(plan, fds)
        else:
            self._fork_into(plan, fds)

    def _start_sandbox(self, plan: StartPlan, fds: list[int]) -> None:
        mapped, may_go = os.pipe()
        uid, gid = os.geteuid(), os.getegid()
        spaces = _SPACES | (0 if plan.host_network else syscalls.NEWNET)
        pid = syscalls.clone_process(spaces)
        if not pid:
            os.close(may_go)
            _run_child(fds[0], lambda control: self._become_first(plan, control, mapped))
        os.close(mapped)
        self._keys[pid] = plan.key
        names = _SPACE_NAMES if plan.host_network else (*_SPACE_NAMES, "net")
        self._pidfds[plan.key] = os.pidfd_open(pid)
        try:
            # Later it hides from other processes of its user, us included.
            paths = [f"/proc/{pid}/ns/{name}" for name in names]
            self._spaces[plan.key] = [os.open(path, os.O_RDONLY | os.O_CLOEXEC) for path in paths]
            _map_ids(pid, plan, uid, gid)
            if plan.cgroup:
                _write(f"{plan.cgroup}/cgroup.procs", str(pid))
            os.write(may_go, b"g")
        finally:
            os.close(may_go)

    def _become_first(self, plan: StartPlan, control: socket.socket, mapped: int) -> None:
        _reset_signals()
        if not os.read(mapped, 1):
            os._exit(1)
        os.close(mapped)
        # What the other sandboxes have is not to be held open by this process.
        own = control.fileno()
        os.closerange(3, own)
        os.closerange(own + 1, 65536)
        first.build_sandbox(plan)
        null = os.open("/dev/null", os.O_RDWR)
        for fd in range(3):
            os.dup2(null, fd)
        os.close(null)
        _send_result(control, {"ready": True})
        control.close()
        first.serve_sandbox(plan.watched_mib)

    def _fork_into(self, plan: RunPlan | TaskPlan, fds: list[int]) -> None:
        spaces = self._spaces.get(plan.key)
        if spaces is None:
            raise ProcessLookupError("the sandbox has ended")
        if os.fork():
            return

        def work(control: socket.socket) -> None:
            _reset_signals()
            # Modules are never to be read from the sandbox's files.
            sys.path[:] = []
            sys.meta_path[:] = []
            if isinstance(plan, RunPlan):
                inside.enter_sandbox(spaces, plan.cgroup)
                inside.run_command(plan, self._filter, control, fds[1:])
            else:
                inside.enter_sandbox(spaces)
                inside.run_task(plan, control, fds[1:])

        self._channel.close()
        _run_child(fds[0], work)

    def _reap_children(self) -> None:
        while True:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            key = self._keys.pop(pid, None)
            if key is not None:
                os.close(self._pidfds.pop(key))
                for fd in self._spaces.pop(key, ()):
                    os.close(fd)
                self._channel.send(json.dumps({"ended": key}).encode())


def _run_child(fd: int, work: Callable[[socket.socket], None]) -> None:
    control = socket.socket(fileno=fd)
    try:
        work(control)
    except BaseException as error:  # noqa: BLE001 - a child never returns to the warden's loop
        _send_result(control, {"error": f"{type(error).__name__}: {error}"})
        os._exit(1)
    os._exit(0)


def _send_result(control: socket.socket, result: dict[str, object]) -> None:
    try:
        control.send(json.dumps(result).encode())
    except OSError:
        # Nobody waits for it any more.
        return


def _reset_signals() -> None:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _map_ids(pid: int, plan: StartPlan, uid: int, gid: int) -> None:
    if plan.has_range:
        for kind in ("uid", "gid"):
            _write(f"/proc/{pid}/{kind}_map", f"0 {FIRST_UID} {NUM_UIDS}")
        return
    _write(f"/proc/{pid}/setgroups", "deny")
    _write(f"/proc/{pid}/uid_map", f"0 {uid} 1")
    _write(f"/proc/{pid}/gid_map", f"0 {gid} 1")


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def main(fd: int) -> None:
    """Serve the socket ``fd``, whose first packet is the filter on system calls."""
    channel = socket.socket(fileno=fd)
    call_filter = channel.recv(MAX_PACKET)
    os.set_inheritable(fd, False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.chdir("/")
    # Eight for each sandbox.
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    # Children load nothing, since their files are those of a sandbox.
    for name in ("ascii", "latin-1", "utf-8"):
        codecs.lookup(name)
    gc.collect()
    gc.freeze()
    Warden(channel, call_filter).serve()
