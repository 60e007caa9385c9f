"""Runs a command in a sandbox, from a process that its processes neither see nor reach.

The runner enters every namespace but that of processes, so nothing inside can signal it; the
command is its child, in the sandbox's own.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import socket
import stat
from collections.abc import Callable, Sequence
from typing import Final

from rlearner_sandbox.providers import archive
from rlearner_sandbox.providers.namespace import first, syscalls
from rlearner_sandbox.providers.namespace.plan import RunPlan, TaskPlan

NOT_FOUND: Final = 127
NOT_EXECUTABLE: Final = 126
MAX_ACCOUNTS: Final = 1 << 20


def enter_sandbox(spaces: Sequence[int], cgroup: str = "") -> None:
    """Enter the namespaces of a sandbox, as its root; children are processes of it."""
    if cgroup:
        with open(f"{cgroup}/cgroup.procs", "w", encoding="ascii") as members:
            members.write("0")
    for fd in spaces:
        syscalls.enter_namespace(fd)
    first.become_root()
    syscalls.die_with_parent()


def run_command(
    plan: RunPlan, call_filter: bytes, control: socket.socket, streams: list[int]
) -> None:
    """Run a command of the entered sandbox with three streams; send how it ended to ``control``.

    When the other end of ``control`` says ``kill`` or is closed, the command and all that was
    started since are killed.
    """
    facts, child_facts = os.pipe()
    child = os.fork()
    if not child:
        control.close()
        os.close(facts)
        _become_command(plan, call_filter, streams, child_facts)
    for fd in (*streams, child_facts):
        os.close(fd)
    began = json.loads(os.read(facts, 4096) or b"[0, 0]")
    os.close(facts)
    is_timed_out = _wait_for_end(child, control)
    if is_timed_out:
        pid, ticks = began
        _in_sandbox(lambda: kill_since(pid, ticks))
    status = os.waitpid(child, 0)[1]
    code = os.waitstatus_to_exitcode(status)
    exit_code = 128 - code if code < 0 else code
    control.send(json.dumps({"exit": exit_code}).encode())


def _wait_for_end(child: int, control: socket.socket) -> bool:
    pidfd = os.pidfd_open(child)
    ready = select.poll()
    ready.register(pidfd, select.POLLIN)
    ready.register(control, select.POLLIN | select.POLLHUP)
    events = dict(ready.poll())
    os.close(pidfd)
    return pidfd not in events


def _become_command(plan: RunPlan, call_filter: bytes, streams: list[int], facts: int) -> None:
    try:
        syscalls.die_with_parent()
        os.setsid()
        for target, fd in enumerate(streams):
            os.dup2(fd, target)
        with open("/proc/self/stat", encoding="ascii", errors="replace") as own:
            ticks = int(own.read().rpartition(")")[2].split()[19])
        os.write(facts, json.dumps([os.getpid(), ticks]).encode())
        os.closerange(3, max(facts, *streams) + 256)
        os.umask(0o022)
        uid, gid, groups = find_account(plan.user)
        os.makedirs(plan.workdir, exist_ok=True)
        _set_limits(plan)
        syscalls.limit_capabilities(syscalls.ROOT_CAPABILITIES, bounding=syscalls.ROOT_CAPABILITIES)
        if plan.has_range:
            os.setgroups(groups)
            os.setresgid(gid, gid, gid)
            os.setresuid(uid, uid, uid)
        syscalls.set_capabilities(syscalls.ROOT_CAPABILITIES if not uid else ())
        os.chdir(plan.workdir)
        syscalls.die_with_parent()
        syscalls.forbid_new_privileges()
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        for number in (signal.SIGPIPE, signal.SIGINT, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        if call_filter:
            syscalls.install_filter(call_filter)
        os.execvpe(plan.argv[0], plan.argv, plan.env)
    except FileNotFoundError as error:
        _give_up(f"{plan.argv[0]}: {error}", NOT_FOUND)
    except (OSError, ValueError, LookupError) as error:
        _give_up(f"{plan.argv[0]}: {error}", NOT_EXECUTABLE)


def _give_up(text: str, exit_code: int) -> None:
    os.write(2, f"sandbox: {text}\n".encode(errors="replace"))
    os._exit(exit_code)


def _set_limits(plan: RunPlan) -> None:
    for kind, most in (
        (resource.RLIMIT_NPROC, plan.processes),
        (resource.RLIMIT_FSIZE, plan.file_bytes),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))


def find_account(user: str) -> tuple[int, int, list[int]]:
    """Return uid, gid and further groups of a user of the sandbox: a name or ``uid[:gid]``."""
    name, _, group = user.partition(":")
    if not name or name == "root":
        return 0, 0, []
    accounts = [line.split(":") for line in _read_accounts("/etc/passwd")]
    entry = next((item for item in accounts if len(item) > 3 and name in (item[0], item[2])), None)
    if entry is None and not name.isdigit():
        raise LookupError(f"there is no user {name!r} in /etc/passwd")
    uid = int(entry[2] if entry else name)
    gid = int(group if group.isdigit() else entry[3] if entry else uid)
    members = [line.split(":") for line in _read_accounts("/etc/group")]
    login = entry[0] if entry else ""
    groups = [
        int(item[2]) for item in members if len(item) > 3 and login in item[3].strip().split(",")
    ]
    return uid, gid, groups if login else []


def _read_accounts(path: str) -> list[str]:
    # The policy may have put anything there.
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return []
    with open(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return []
        return file.read(MAX_ACCOUNTS).decode(errors="replace").splitlines()


def _in_sandbox(work: Callable[[], None]) -> None:
    child = os.fork()
    if not child:
        try:
            work()
        finally:
            os._exit(0)
    os.waitpid(child, 0)


def kill_since(first_pid: int, ticks: int) -> None:
    """Kill every process of this sandbox that was started at ``ticks`` or later, except other
    commands and what they started.
    """
    for _ in range(500):
        victims = _started_since(first_pid, ticks)
        if not victims:
            return
        for pid in victims:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


def _started_since(first_pid: int, ticks: int) -> list[int]:
    parents: dict[int, int] = {}
    started: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", encoding="ascii", errors="replace") as file:
                fields = file.read().rpartition(")")[2].split()
        except OSError:
            continue
        # A zombie is dead already.
        if fields[0] not in "ZX":
            parents[int(name)] = int(fields[1])
            started[int(name)] = int(fields[19])

    def command_of(pid: int) -> int:
        while parents.get(pid, 0) not in (0, 1):
            pid = parents[pid]
        return pid

    # Commands come from outside, so their parent is 0, as that of the first process.
    others = {pid for pid, parent in parents.items() if not parent} - {first_pid}
    return [
        pid
        for pid, began in started.items()
        if began >= ticks and pid not in (1, os.getpid()) and command_of(pid) not in others
    ]


def run_task(plan: TaskPlan, control: socket.socket, streams: list[int]) -> None:
    """Do work of our own in the entered sandbox and send its result to ``control``."""
    syscalls.hide_memory()
    result: dict[str, object] = {}
    fds: list[int] = []
    try:
        if plan.task == "pack":
            with open(streams[0], "wb") as stream:
                archive.write_archive(plan.argument, stream, links=False)
        elif plan.task == "unpack":
            os.umask(0o022)
            with open(streams[0], "rb") as stream:
                archive.read_archive(stream, os.path.join("/", plan.argument), trusted=True)
        elif plan.task == "listen":
            fds = [_listen_at(plan.argument, plan.number).detach()]
        elif plan.task == "signal":
            _in_sandbox(lambda: _signal_all(plan.number))
    except FileNotFoundError as error:
        result = {"error": str(error), "missing": True}
    except (OSError, ValueError) as error:
        result = {"error": str(error)}
    socket.send_fds(control, [json.dumps(result).encode()], fds)


def _listen_at(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    if family == socket.AF_INET and not address.startswith("127."):
        syscalls.add_loopback_address(address)
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((address, port))
    listener.listen(128)
    return listener


def _signal_all(number: int) -> None:
    # Twice for a process that was just forked by one that is not stopped yet.
    for _ in range(3):
        for name in os.listdir("/proc"):
            if name.isdigit() and int(name) not in (1, os.getpid()):
                try:
                    os.kill(int(name), number)
                except ProcessLookupError:
                    continue
