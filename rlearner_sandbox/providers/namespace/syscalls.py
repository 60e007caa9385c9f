"""Calls of Linux that Python 3.11 has no function for. Each raises OSError if it fails."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import socket
import struct
from collections.abc import Iterable, Sequence
from ipaddress import IPv4Address
from typing import Final

NEWNS: Final = 0x00020000
NEWCGROUP: Final = 0x02000000
NEWUTS: Final = 0x04000000
NEWIPC: Final = 0x08000000
NEWUSER: Final = 0x10000000
NEWPID: Final = 0x20000000
NEWNET: Final = 0x40000000

MS_RDONLY: Final = 1
MS_NOSUID: Final = 2
MS_NODEV: Final = 4
MS_NOEXEC: Final = 8
MS_BIND: Final = 4096
MS_REC: Final = 16384
MS_PRIVATE: Final = 1 << 18

# CHOWN, DAC_OVERRIDE, FOWNER, FSETID, KILL, SETGID, SETUID, NET_BIND_SERVICE: what programs that
# install packages need. They hold for the sandbox's own users, files and ports alone.
ROOT_CAPABILITIES: Final = frozenset((0, 1, 3, 4, 5, 6, 7, 10))
CAP_KILL: Final = 5
CAP_SYS_PTRACE: Final = 19

_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_IS_X86: Final = platform.machine() == "x86_64"
_CLONE: Final = 56 if _IS_X86 else 220
_PIVOT_ROOT: Final = 155 if _IS_X86 else 41
_OPEN_TREE: Final = 428
_MOVE_MOUNT: Final = 429
_MOUNT_SETATTR: Final = 442
_AT_EMPTY_PATH: Final = 0x1000
_AT_RECURSIVE: Final = 0x8000
_SIGCHLD: Final = 17
_LAST_CAPABILITY: Final = 63
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_DUMPABLE: Final = 4
_PR_SET_SECCOMP: Final = 22
_PR_CAPBSET_DROP: Final = 24
_PR_SET_NO_NEW_PRIVS: Final = 38
_SIOCSIFADDR: Final = 0x8916
_SIOCGIFFLAGS: Final = 0x8913
_SIOCSIFFLAGS: Final = 0x8914
_IFF_UP: Final = 1


def _check(result: int, name: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def _call_kernel(number: int, arguments: Sequence[int | bytes]) -> int:
    """Make a system call that the C library has no function for."""
    return int(_LIBC.syscall(number, *arguments))


def clone_process(flags: int) -> int:
    """Fork into new namespaces; return the child's process id, and 0 in the child.

    Only for a process without further threads.
    """
    return _check(_call_kernel(_CLONE, [flags | _SIGCHLD, 0, 0, 0, 0]), "clone")


def enter_namespace(fd: int) -> None:
    """Enter the namespace that ``fd`` stands for; children, if it is one of processes."""
    _check(_LIBC.setns(fd, 0), "setns")


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    """Mount a file system, see mount(2)."""
    result = _LIBC.mount(
        source.encode(), target.encode(), kind.encode() or None, flags, options.encode() or None
    )
    _check(result, f"mount {kind or source}")


def open_tree(source: str, *, read_only: bool) -> int:
    """Return a copy of what is mounted at and below ``source``, which is mounted nowhere yet."""
    clone_recursive = 1 | _AT_RECURSIVE | os.O_CLOEXEC
    fd = _check(_LIBC.syscall(_OPEN_TREE, -100, source.encode(), clone_recursive), "open_tree")
    if read_only:
        # struct mount_attr: set, clear, propagation, user namespace
        attributes = struct.pack("=QQQQ", MS_RDONLY, 0, 0, 0)
        flags = _AT_RECURSIVE | _AT_EMPTY_PATH
        result = _call_kernel(_MOUNT_SETATTR, [fd, b"", flags, attributes, len(attributes)])
        _check(result, "mount_setattr")
    return fd


def attach_tree(fd: int, target: str) -> None:
    """Mount what ``open_tree`` returned."""
    from_empty_path = 4
    result = _call_kernel(_MOVE_MOUNT, [fd, b"", -100, target.encode(), from_empty_path])
    _check(result, f"move_mount {target}")
    os.close(fd)


def change_root(folder: str) -> None:
    """Make a mounted folder the root of this process; the old one stays mounted above it."""
    os.chdir(folder)
    _check(_LIBC.syscall(_PIVOT_ROOT, b".", b"."), "pivot_root")


def drop_old_root() -> None:
    """Unmount the root before ``change_root``."""
    _check(_LIBC.umount2(b".", 2), "umount")
    os.chdir("/")


def set_hostname(name: str) -> None:
    """Name this UTS namespace."""
    _check(_LIBC.sethostname(name.encode(), len(name)), "sethostname")


def die_with_parent() -> None:
    """Be killed when the parent ends; to be called after each change of uids, which undoes it."""
    _check(_LIBC.prctl(_PR_SET_PDEATHSIG, 9, 0, 0, 0), "prctl")


def hide_memory() -> None:
    """Keep this process's memory from others of its user."""
    _check(_LIBC.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0), "prctl")


def limit_capabilities(kept: Iterable[int], bounding: Iterable[int] = ()) -> None:
    """Keep these capabilities; let programs that are executed get only those in ``bounding``."""
    for number in range(_LAST_CAPABILITY + 1):
        if number in bounding:
            continue
        if _LIBC.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0) < 0:
            if ctypes.get_errno() != errno.EINVAL:
                _check(-1, "prctl")
            # The kernel has no more.
            break
    set_capabilities(kept)


def set_capabilities(kept: Iterable[int]) -> None:
    """Keep these capabilities."""
    bits = sum(1 << number for number in kept)
    halves = [(bits >> shift) & 0xFFFFFFFF for shift in (0, 32)]
    header = struct.pack("=Ii", 0x20080522, 0)
    data = b"".join(struct.pack("=III", half, half, 0) for half in halves)
    _check(_LIBC.capset(header, data), "capset")


def forbid_new_privileges() -> None:
    """Let no program that is executed from now on gain privileges by its file."""
    _check(_LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")


def install_filter(program: bytes) -> None:
    """Apply a filter on system calls to this process and all that it starts."""
    code = ctypes.create_string_buffer(program, len(program))
    filter_program = struct.pack("=H6xQ", len(program) // 8, ctypes.addressof(code))
    _check(_LIBC.prctl(_PR_SET_SECCOMP, 2, filter_program, 0, 0), "prctl")


def raise_loopback() -> None:
    """Switch the loopback interface of this network namespace on."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = struct.pack("16sH22x", b"lo", 0)
        flags = struct.unpack("16sH22x", fcntl.ioctl(control, _SIOCGIFFLAGS, request))[1]
        fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sH22x", b"lo", flags | _IFF_UP))


def add_loopback_address(address: str) -> None:
    """Give the loopback interface another IPv4 address."""
    packed = IPv4Address(address).packed
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = struct.pack("16sHH4s16x", b"lo:1", socket.AF_INET, 0, packed)
        fcntl.ioctl(control, _SIOCSIFADDR, request)
