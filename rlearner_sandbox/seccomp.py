"""The filter on system calls: a BPF program in the kernel's format (seccomp(2), linux/filter.h, linux/seccomp.h).

It forbids what tests of a program do not need and kernels have had bugs in: tracing, namespaces, mounts, keys, BPF,
io_uring, sockets other than Unix and IP, and memory without a limit (memfd, System V and POSIX shared memory and
queues).
"""

from __future__ import annotations

import errno
import platform
import socket
import struct
from typing import Final

LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER_AT, ARCH_AT, FIRST_ARGUMENT_AT = 0, 4, 16  # in struct seccomp_data; the low half of the argument
ALLOW, KILL, FAIL_WITH = 0x7FFF0000, 0x80000000, 0x00050000
X32: Final = 0x40000000  # x86-64's second set of calls
NEW_NAMESPACES: Final = 0x7E020000  # CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
FAMILIES: Final = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6)

# machine: AUDIT_ARCH, clone, socket, clone3, and what is refused
_SAME_EVERYWHERE: Final = (425, 426, 427, 428, 429, 430, 431, 432, 433, 438, 442, 447)
# io_uring_setup, _enter, _register, open_tree, move_mount, fsopen, fsconfig, fsmount, fspick, pidfd_getfd,
# mount_setattr, memfd_secret
_X86_64: Final = {
    "ptrace": 101, "mount": 165, "umount2": 166, "pivot_root": 155, "chroot": 161, "unshare": 272, "setns": 308,
    "bpf": 321, "perf_event_open": 298, "add_key": 248, "request_key": 249, "keyctl": 250, "userfaultfd": 323,
    "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312, "memfd_create": 319, "shmget": 29, "msgget": 68,
    "semget": 64, "mq_open": 240, "name_to_handle_at": 303, "open_by_handle_at": 304, "init_module": 175,
    "finit_module": 313, "delete_module": 176, "kexec_load": 246, "kexec_file_load": 320, "reboot": 169, "swapon": 167,
    "swapoff": 168, "acct": 163, "quotactl": 179, "syslog": 103, "personality": 135, "iopl": 172, "ioperm": 173,
    "modify_ldt": 154,
}  # fmt: skip
_AARCH64: Final = {
    "ptrace": 117, "mount": 40, "umount2": 39, "pivot_root": 41, "chroot": 51, "unshare": 97, "setns": 268, "bpf": 280,
    "perf_event_open": 241, "add_key": 217, "request_key": 218, "keyctl": 219, "userfaultfd": 282,
    "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272, "memfd_create": 279, "shmget": 194, "msgget": 186,
    "semget": 190, "mq_open": 180, "name_to_handle_at": 264, "open_by_handle_at": 265, "init_module": 105,
    "finit_module": 273, "delete_module": 106, "kexec_load": 104, "kexec_file_load": 294, "reboot": 142, "swapon": 224,
    "swapoff": 225, "acct": 89, "quotactl": 60, "syslog": 116, "personality": 92,
}  # fmt: skip
MACHINES: Final = {"x86_64": (0xC000003E, 56, 41, _X86_64), "aarch64": (0xC00000B7, 220, 198, _AARCH64)}
CLONE3: Final = 435


def program(machine: str | None = None, *, memory_files: bool = False) -> bytes:
    """Return the filter for ``bwrap --seccomp``; raise KeyError unless the machine is x86_64 or aarch64.

    Args:
        memory_files: whether memfd_create is allowed, for programs whose memory somebody else watches.
    """
    arch, clone, sockets, refused = MACHINES[machine or platform.machine()]
    code = [_op(LOAD, ARCH_AT), _op(EQUAL, arch, 1, 0), _op(RETURN, KILL)]
    code += [_op(LOAD, NUMBER_AT), _op(AT_LEAST, X32, 0, 1), _op(RETURN, KILL)]
    names = [name for name in refused if not (memory_files and name == "memfd_create")]
    for number in (*(refused[name] for name in names), *_SAME_EVERYWHERE):
        code += [_op(EQUAL, number, 0, 1), _op(RETURN, FAIL_WITH | errno.EPERM)]
    # Its flags lie in memory, which a filter cannot read; C libraries fall back to clone.
    code += [_op(EQUAL, CLONE3, 0, 1), _op(RETURN, FAIL_WITH | errno.ENOSYS)]
    code += [_op(EQUAL, clone, 0, 4), _op(LOAD, FIRST_ARGUMENT_AT), _op(ANY_BIT, NEW_NAMESPACES, 0, 1)]
    code += [_op(RETURN, FAIL_WITH | errno.EPERM), _op(RETURN, ALLOW)]
    code += [_op(EQUAL, sockets, 0, len(FAMILIES) + 2), _op(LOAD, FIRST_ARGUMENT_AT)]
    code += [_op(EQUAL, family, len(FAMILIES) - index, 0) for index, family in enumerate(FAMILIES)]
    code += [_op(RETURN, FAIL_WITH | errno.EAFNOSUPPORT), _op(RETURN, ALLOW)]
    return b"".join(code)


def _op(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
