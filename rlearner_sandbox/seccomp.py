"""The filter on system calls, in BPF (seccomp(2), linux/filter.h, linux/seccomp.h).

It allows the calls that were reviewed. Refused are those that programs do not need and kernels have
had bugs in (tracing, namespaces, mounts, keys, BPF, io_uring, sockets other than Unix and IP),
those that take memory which no limit sees (memfd, System V and POSIX shared memory and queues,
larger buffers of sockets and pipes), and every call that is newer than the review.
"""

from __future__ import annotations

import errno
import fcntl
import platform
import socket
import struct
from dataclasses import dataclass
from typing import Final

LOAD = 0x20
EQUAL = 0x15
AT_LEAST = 0x35
ANY_BIT = 0x45
RETURN = 0x06
# in struct seccomp_data; the low half of the argument
NUMBER_AT = 0
ARCH_AT = 4
FIRST_ARGUMENT_AT = 16
SECOND_ARGUMENT_AT = 24
THIRD_ARGUMENT_AT = 32
ALLOW = 0x7FFF0000
KILL = 0x80000000
FAIL_WITH = 0x00050000
X32: Final = 0x40000000  # x86-64's second set of calls
# CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
NEW_NAMESPACES: Final = 0x7E020000
FAMILIES: Final = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6)
# the last two: SO_SNDBUFFORCE, SO_RCVBUFFORCE
BUFFER_OPTIONS: Final = (socket.SO_SNDBUF, socket.SO_RCVBUF, 32, 33)
# its flags lie in memory, which a filter cannot read; C libraries fall back to clone
CLONE3: Final = 435

# Calls since Linux 5.1, with the same numbers everywhere: pidfd_send_signal, pidfd_open,
# close_range, openat2, faccessat2, process_madvise, epoll_pwait2, landlock_*, futex_waitv,
# cachestat, fchmodat2, futex_wake, futex_wait, futex_requeue, mseal
NEWER: Final = (424, 434, 436, 437, 439, 440, 441, 444, 445, 446, 449, 451, 452, 454, 455, 456, 462)


@dataclass(frozen=True)
class CallTable:
    """The calls of one kind of machine.

    Attributes:
        arch: AUDIT_ARCH.
        last: number of the last call before those of ``NEWER``; calls up to it are allowed unless
            they are refused.
    """

    arch: int
    last: int
    clone: int
    socket: int
    setsockopt: int
    fcntl: int
    refused: dict[str, int]


_X86_64: Final = {
    "ptrace": 101, "mount": 165, "umount2": 166, "pivot_root": 155, "chroot": 161, "unshare": 272,
    "setns": 308,
    "bpf": 321, "perf_event_open": 298, "add_key": 248, "request_key": 249, "keyctl": 250,
    "userfaultfd": 323,
    "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312, "memfd_create": 319,
    "shmget": 29, "msgget": 68,
    "semget": 64, "mq_open": 240, "name_to_handle_at": 303, "open_by_handle_at": 304,
    "init_module": 175,
    "finit_module": 313, "delete_module": 176, "kexec_load": 246, "kexec_file_load": 320,
    "reboot": 169, "swapon": 167,
    "swapoff": 168, "acct": 163, "quotactl": 179, "syslog": 103, "personality": 135, "iopl": 172,
    "ioperm": 173,
    "modify_ldt": 154, "uselib": 134, "sysfs": 139, "vhangup": 153, "_sysctl": 156, "adjtimex": 159,
    "settimeofday": 164, "sethostname": 170, "setdomainname": 171, "create_module": 174,
    "get_kernel_syms": 177,
    "query_module": 178, "nfsservctl": 180, "lookup_dcookie": 212, "clock_settime": 227,
    "vserver": 236,
    "migrate_pages": 256, "move_pages": 279, "fanotify_init": 300, "clock_adjtime": 305,
}  # fmt: skip
_AARCH64: Final = {
    "ptrace": 117, "mount": 40, "umount2": 39, "pivot_root": 41, "chroot": 51, "unshare": 97,
    "setns": 268, "bpf": 280,
    "perf_event_open": 241, "add_key": 217, "request_key": 218, "keyctl": 219, "userfaultfd": 282,
    "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272, "memfd_create": 279,
    "shmget": 194, "msgget": 186,
    "semget": 190, "mq_open": 180, "name_to_handle_at": 264, "open_by_handle_at": 265,
    "init_module": 105,
    "finit_module": 273, "delete_module": 106, "kexec_load": 104, "kexec_file_load": 294,
    "reboot": 142, "swapon": 224,
    "swapoff": 225, "acct": 89, "quotactl": 60, "syslog": 116, "personality": 92,
    "lookup_dcookie": 18,
    "nfsservctl": 42, "vhangup": 58, "clock_settime": 112, "sethostname": 161, "setdomainname": 162,
    "settimeofday": 170, "adjtimex": 171, "migrate_pages": 238, "move_pages": 239,
    "fanotify_init": 262,
    "clock_adjtime": 266,
}  # fmt: skip
MACHINES: Final = {
    "x86_64": CallTable(
        0xC000003E, 334, clone=56, socket=41, setsockopt=54, fcntl=72, refused=_X86_64
    ),
    "aarch64": CallTable(
        0xC00000B7, 294, clone=220, socket=198, setsockopt=208, fcntl=25, refused=_AARCH64
    ),
}


def program(
    machine: str | None = None, *, memory_files: bool = False, route_sockets: bool = False
) -> bytes:
    """Return the filter for ``bwrap --seccomp``; KeyError unless x86_64 or aarch64.

    Args:
        memory_files: whether memfd_create is allowed, for programs whose memory somebody else
            watches.
        route_sockets: whether they may open netlink sockets for routes, to list the network
            interfaces.
    """
    table = MACHINES[machine or platform.machine()]
    code = [
        _instruction(LOAD, ARCH_AT),
        _instruction(EQUAL, table.arch, 1, 0),
        _instruction(RETURN, KILL),
    ]
    code += [
        _instruction(LOAD, NUMBER_AT),
        _instruction(AT_LEAST, X32, 0, 1),
        _instruction(RETURN, KILL),
    ]
    for name, number in table.refused.items():
        if not (memory_files and name == "memfd_create"):
            code += _if_equal(number, _fail_with(errno.EPERM))
    code += _if_equal(CLONE3, _fail_with(errno.ENOSYS))
    has_namespaces = [
        _instruction(LOAD, FIRST_ARGUMENT_AT),
        _instruction(ANY_BIT, NEW_NAMESPACES, 0, 1),
        _fail_with(errno.EPERM),
    ]
    code += _if_equal(table.clone, *has_namespaces, _instruction(RETURN, ALLOW))
    families = [
        part for family in FAMILIES for part in _if_equal(family, _instruction(RETURN, ALLOW))
    ]
    if route_sockets:
        families += _if_equal(
            socket.AF_NETLINK,
            _instruction(LOAD, THIRD_ARGUMENT_AT),
            *_if_equal(0, _instruction(RETURN, ALLOW)),
            _fail_with(errno.EAFNOSUPPORT),
        )
    code += _if_equal(
        table.socket,
        _instruction(LOAD, FIRST_ARGUMENT_AT),
        *families,
        _fail_with(errno.EAFNOSUPPORT),
    )
    options = [
        part for option in BUFFER_OPTIONS for part in _if_equal(option, _fail_with(errno.EPERM))
    ]
    other_level = [
        _instruction(LOAD, SECOND_ARGUMENT_AT),
        _instruction(EQUAL, socket.SOL_SOCKET, 1, 0),
        _instruction(RETURN, ALLOW),
    ]
    code += _if_equal(
        table.setsockopt,
        *other_level,
        _instruction(LOAD, THIRD_ARGUMENT_AT),
        *options,
        _instruction(RETURN, ALLOW),
    )
    resizing = _if_equal(fcntl.F_SETPIPE_SZ, _fail_with(errno.EPERM))
    code += _if_equal(
        table.fcntl, _instruction(LOAD, SECOND_ARGUMENT_AT), *resizing, _instruction(RETURN, ALLOW)
    )
    code += [_instruction(AT_LEAST, table.last + 1, 1, 0), _instruction(RETURN, ALLOW)]
    for number in NEWER:
        code += _if_equal(number, _instruction(RETURN, ALLOW))
    # C libraries then use an older call.
    return b"".join([*code, _fail_with(errno.ENOSYS)])


def _if_equal(value: int, *body: bytes) -> list[bytes]:
    """Return the code that runs ``body``, which must return, if the loaded word has this value."""
    return [_instruction(EQUAL, value, 0, len(body)), *body]


def _fail_with(error: int) -> bytes:
    return _instruction(RETURN, FAIL_WITH | error)


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
