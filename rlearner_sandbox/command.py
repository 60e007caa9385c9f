"""Builds the command line of bubblewrap, and explains why it does not work. Starts no process."""

from __future__ import annotations

import marshal
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import CodeType
from typing import Final, Literal

Mode = Literal["script", "calls", "asserts", "tests"]

DEVICES: Final = ("/dev/null", "/dev/urandom")
ENVIRONMENT: Final = {
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
} | dict.fromkeys(("HOME", "TMPDIR"), "/tmp")
CONTAINER: Final = (
    "docker run --security-opt seccomp=unconfined --security-opt apparmor=unconfined "
    "--security-opt "
    "systempaths=unconfined"
)
SWITCHES: Final = (  # file under /proc/sys, what it must not hold, the command
    (
        "kernel/apparmor_restrict_unprivileged_userns",
        "1",
        "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0",
    ),
    ("kernel/unprivileged_userns_clone", "0", "sysctl -w kernel.unprivileged_userns_clone=1"),
    ("user/max_user_namespaces", "0", "sysctl -w user.max_user_namespaces=15000"),
)
# The first bytes at the socket, whose number is the second argument, are code of ours.
BOOT: Final = (
    "import marshal, os, sys; code, modules = marshal.loads(os.read(int(sys.argv[2]), "
    "int(sys.argv.pop(1)))); exec(code)"
)
_FRAMES: Final = "rlearner_workers.frames"


def _ours(*names: str) -> list[str]:
    return [f"rlearner_sandbox.{name}" for name in names]


# What goes along with ``inside.py``, each after what it imports.
MODULES: Final[dict[Mode, tuple[str, ...]]] = {
    "script": (),
    "calls": (),
    "asserts": (_FRAMES, *_ours("plain", "channel", "host")),
    "tests": (_FRAMES, *_ours("plain", "channel", "remote", "pytest_subset", "judge")),
}
# Unused in systemd's table of uids. Processes of one uid share limits, so programs have their own.
FIRST_UID: Final = 0x70000000
NOBODY: Final = 65534


@dataclass(frozen=True)
class SandboxLimits:
    """Limits of one program."""

    wall_s: float = 8.0  # from the moment it begins
    cpu_s: int = 4  # of each of its processes
    memory_mib: int = 1024  # of all its processes together; each alone may not even reserve more
    processes: int = 32  # threads count too
    open_files: int = 64
    output_kib: int = 1024  # on stdout and stderr together
    file_mib: int = 64  # of one file, and of all in /tmp together


def python() -> str:
    """Return the interpreter itself, not the link to it in a virtual environment."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


def inside(
    fd: int,
    mode: Mode,
    limits: SandboxLimits,
    *,
    uid: int,
    processes: int,
    channel: int = -1,
    packages: Sequence[str] = (),
) -> list[str]:
    """Return the command of Python with the boot code; ``channel``: socket to the tests, or -1."""
    # In the order in which inside.py reads them.
    numbers = [
        fd,
        uid,
        processes,
        limits.cpu_s,
        limits.memory_mib << 20,
        limits.open_files,
        limits.file_mib << 20,
        channel,
    ]
    return [
        python(),
        "-I",
        "-S",
        "-X",
        "utf8",
        "-c",
        BOOT,
        str(len(code(mode))),
        *map(str, numbers),
        mode,
        *packages,
    ]


def jail(
    bwrap: str,
    filter_fd: int,
    limits: SandboxLimits,
    *,
    root: bool,
    packages: Sequence[str] = (),
    network: bool = False,
    scratch: Sequence[str] = (),
    folder: str = "/tmp",
) -> list[str]:
    """Return the command line of bubblewrap up to the command it runs.

    Args:
        filter_fd: a file with the filter on system calls.
        root: whether we run as root. Then no user namespace is needed, and Python changes its uid
            first.
        packages: files and folders that the program may read, besides the standard library.
        network: whether it shares the host's network.
        scratch: folders that it may write to; empty at first, in memory.
        folder: its working folder.
    """
    privileges = ["--unshare-user"]
    if root:
        privileges = ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    spaces = [
        f"--unshare-{name}"
        for name in ("pid", "ipc", "uts", "cgroup-try", *(() if network else ("net",)))
    ]
    size = ("--perms", "1777", "--size", str(limits.file_mib << 20), "--tmpfs")
    writable = [part for path in scratch for part in (*size, path)]
    return [
        bwrap, *privileges, *spaces, "--die-with-parent", "--new-session", "--seccomp",
        str(filter_fd), "--hostname",
        "sandbox", *size, "/tmp", *_root_options(tuple(packages), folder), *writable, "--proc",
        "/proc", "--remount-ro", "/",
        "--chdir", folder, "--",
    ]  # fmt: skip


def free_uid(number: int, maps: Sequence[str]) -> int:
    """Return an unprivileged uid with its own process count; ``nobody`` if there are few uids.

    Args:
        number: a different one for each program that runs at the same time.
        maps: /proc/self/uid_map and gid_map.
    """
    uid = FIRST_UID + number % (1 << 26)
    ranges = [[tuple(map(int, line.split())) for line in text.splitlines()] for text in maps]
    is_mapped = all(
        any(first <= uid < first + count for first, _, count in uid_map) for uid_map in ranges
    )
    return uid if is_mapped else NOBODY


def advice(output: str, settings: Path = Path("/proc/sys")) -> str:
    """Return why bubblewrap does not work here, in one line, with the command that may fix it."""
    problem = " ".join(output.split())[-300:] or "it says nothing"
    for name, bad, command in SWITCHES:
        try:
            value = (settings / name).read_text(encoding="ascii").strip()
        except OSError:
            continue
        if value == bad:
            return f"bubblewrap does not work here ({problem}); as root run: {command}"
    if "Unknown option" in output:
        return (
            f"bubblewrap is too old ({problem}); 0.6 or newer is needed: apt-get install bubblewrap"
        )
    return f"bubblewrap does not work here ({problem}); in a container start that with: {CONTAINER}"


@lru_cache(maxsize=4)
def code(mode: Mode) -> bytes:
    """Return the compiled code of a mode, because compiling it inside would take milliseconds."""
    return marshal.dumps(
        (
            _compile_module("rlearner_sandbox.inside"),
            {module: _compile_module(module) for module in MODULES[mode]},
        )
    )


def _compile_module(module: str) -> CodeType:
    package, _, name = module.partition(".")
    file = Path(__file__).parents[1] / package / f"{name}.py"
    return compile(file.read_text(encoding="utf-8"), file.name, "exec", dont_inherit=True)


@lru_cache(maxsize=8)
def _root_options(packages: tuple[str, ...], working: str = "/tmp") -> tuple[str, ...]:
    """Return the options for the root folder: C library, Python, two devices."""
    links: list[str] = []
    paths: list[str] = ["/usr/lib", "/usr/lib64"]
    for folder in ("/lib", "/lib64"):
        if os.path.islink(folder):
            links += ["--symlink", os.readlink(folder), folder]
        else:
            paths.append(folder)
    if sys.base_prefix in ("/usr", "/usr/local"):
        paths += [
            os.path.join(sys.base_prefix, "lib"),
            os.path.join(sys.base_prefix, "lib64"),
            python(),
        ]
    else:
        paths += [sys.base_prefix, python()]
    paths += map(os.path.abspath, packages)
    # Programs look for a file of /etc at its own place, even where it is a link to another file.
    for path in packages:
        if path.startswith("/etc/") and os.path.islink(path):
            links += ["--symlink", os.path.realpath(path), path]
    paths = [path for path in dict.fromkeys(map(os.path.realpath, paths)) if os.path.exists(path)]
    paths = [path for path in paths if not any(path.startswith(folder + "/") for folder in paths)]
    folders = [
        str(folder) for path in (*paths, *DEVICES) for folder in reversed(Path(path).parents)
    ]
    folders += [str(folder) for folder in (*reversed(Path(working).parents), working)]
    above = dict.fromkeys(folder for folder in folders if folder not in ("/", "/tmp"))
    # Without explicit modes they get those that they have outside.
    result = [part for folder in above for part in ("--perms", "0755", "--dir", folder)]
    result += [part for path in paths for part in ("--ro-bind", path, path)]
    result += [part for path in DEVICES for part in ("--dev-bind", path, path)]
    return (*result, *links, "--symlink", "/tmp", "/dev/shm")
