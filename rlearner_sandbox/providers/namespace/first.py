"""The first process of a sandbox: builds its root, then reaps and watches over its memory.

It is process 1 there, so the kernel delivers no signal to it from inside; when it dies, everything
in the sandbox dies. It dies with the process that made it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import stat
from typing import Final

from rlearner_sandbox.providers.namespace import syscalls
from rlearner_sandbox.providers.namespace.plan import StartPlan

DEVICES: Final = ("null", "zero", "full", "random", "urandom", "tty")
DEVICE_LINKS: Final = (
    ("/proc/self/fd", "fd"),
    ("/proc/self/fd/0", "stdin"),
    ("/proc/self/fd/1", "stdout"),
    ("/proc/self/fd/2", "stderr"),
    ("pts/ptmx", "ptmx"),
)
SHARED_MEMORY_MIB: Final = 64
# Between two looks at the memory of its processes; while there are none, a process may enter.
WATCH_S: Final = 0.5
IDLE_S: Final = 2.0
_PRIVATE: Final = syscalls.MS_NOSUID | syscalls.MS_NODEV


def build_sandbox(plan: StartPlan) -> None:
    """Make the sandbox's root, devices and network, and give up every privilege.

    The caller has just been cloned into new namespaces, and its uids are mapped.
    """
    # While it still has the hub's user, who alone may enter the folders of layers.
    root_fds = [os.open(path, os.O_PATH) for path in plan.lower]
    write_fds = [os.open(path, os.O_PATH) for path in (plan.upper, plan.work) if path]
    copied_fd = os.open(plan.copied, os.O_PATH) if plan.copied else -1
    become_root()
    syscalls.die_with_parent()
    syscalls.hide_memory()
    os.setsid()
    os.umask(0o022)
    syscalls.mount("none", "/", flags=syscalls.MS_REC | syscalls.MS_PRIVATE)
    syscalls.mount("tmpfs", "/tmp", "tmpfs", options="mode=755,size=64k")
    os.mkdir("/tmp/root")
    if plan.copied:
        syscalls.mount(_by_fd(copied_fd), "/tmp/root", flags=syscalls.MS_BIND)
    else:
        layers = ":".join(map(_by_fd, root_fds))
        options = (
            f"lowerdir={layers},upperdir={_by_fd(write_fds[0])},workdir={_by_fd(write_fds[1])}"
        )
        # Without user xattrs an overlay in a user namespace cannot remember what was removed.
        syscalls.mount("overlay", "/tmp/root", "overlay", _PRIVATE, f"{options},userxattr")
    trees = [(syscalls.open_tree(source, read_only=True), target) for source, target in plan.shown]
    devices = {name: syscalls.open_tree(f"/dev/{name}", read_only=False) for name in DEVICES}
    # From here on no link of the image leads to a file of the host. A new /proc may only be mounted
    # while the host's is.
    syscalls.change_root("/tmp/root")
    for fd, target in trees:
        _show(fd, target)
    _mount_devices(devices)
    os.makedirs("/proc", exist_ok=True)
    syscalls.mount("proc", "/proc", "proc", _PRIVATE | syscalls.MS_NOEXEC)
    syscalls.drop_old_root()
    if not plan.host_network:
        syscalls.raise_loopback()
        syscalls.set_hostname("sandbox")
    # In a copy of a sandbox it may be a link to nowhere, which is no failure of the provider's: the
    # commands fail.
    with contextlib.suppress(OSError):
        os.makedirs(plan.workdir, exist_ok=True)
    kept = () if plan.cgroup else (syscalls.CAP_KILL, syscalls.CAP_SYS_PTRACE)
    syscalls.limit_capabilities(kept)
    syscalls.forbid_new_privileges()


def become_root() -> None:
    """Become the sandbox's root, whose uid is that of another user outside."""
    if os.path.exists("/proc/self/setgroups") and _may_set_groups():
        os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)


def _may_set_groups() -> bool:
    with open("/proc/self/setgroups", encoding="ascii") as file:
        return file.read().strip() == "allow"


def serve_sandbox(watched_mib: int) -> None:
    """Reap orphans for ever; kill the largest process when all together exceed ``watched_mib``."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    wait_s = WATCH_S
    while True:
        signal.sigtimedwait([signal.SIGCHLD], wait_s)
        _reap_orphans()
        if watched_mib:
            sizes = process_sizes()
            wait_s = WATCH_S if sizes else IDLE_S
            if sum(sizes.values()) > watched_mib << 20:
                _end_largest(watched_mib << 20)
        else:
            wait_s = 3600.0


def process_sizes(*, proportional: bool = False) -> dict[int, int]:
    """Return the resident bytes of each process but this one; ``proportional``: shared pages count
    by share.
    """
    sizes: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and name != "1":
            try:
                sizes[int(name)] = _resident(name, proportional=proportional)
            except (OSError, ValueError, IndexError):
                continue
    return sizes


def _resident(name: str, *, proportional: bool) -> int:
    if not proportional:
        with open(f"/proc/{name}/statm", encoding="ascii") as statm:
            fields = statm.read().split()
        # Without the pages of files, which the kernel can drop.
        return (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGESIZE")
    with open(f"/proc/{name}/smaps_rollup", encoding="ascii") as rollup:
        lines = [line.split() for line in rollup]
    return sum(int(line[1]) << 10 for line in lines if line[0] in ("Pss_Anon:", "Pss_Shmem:"))


def _end_largest(max_bytes: int) -> None:
    sizes = process_sizes(proportional=True)
    if sum(sizes.values()) > max_bytes:
        try:
            os.kill(max(sizes, key=lambda number: sizes[number]), signal.SIGKILL)
        except ProcessLookupError:
            return


def _reap_orphans() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return


def _by_fd(fd: int) -> str:
    return f"/proc/self/fd/{fd}"


def _show(fd: int, target: str) -> None:
    if stat.S_ISDIR(os.fstat(fd).st_mode):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with open(target, "ab"):
            pass
    syscalls.attach_tree(fd, target)


def _mount_devices(devices: dict[str, int]) -> None:
    os.makedirs("/dev", exist_ok=True)
    flags = syscalls.MS_NOSUID | syscalls.MS_NOEXEC
    syscalls.mount("tmpfs", "/dev", "tmpfs", flags, "mode=755,size=64k")
    for name, fd in devices.items():
        with open(f"/dev/{name}", "wb"):
            pass
        syscalls.attach_tree(fd, f"/dev/{name}")
    for source, name in DEVICE_LINKS:
        os.symlink(source, f"/dev/{name}")
    for name in ("pts", "shm"):
        os.mkdir(f"/dev/{name}")
    syscalls.mount("devpts", "/dev/pts", "devpts", flags, "newinstance,ptmxmode=0666,mode=620")
    size = f"mode=1777,size={SHARED_MEMORY_MIB}m"
    syscalls.mount("tmpfs", "/dev/shm", "tmpfs", _PRIVATE, size)
