"""Starts a domain's workers and agents in bubblewrap, and decides what they may read there."""

from __future__ import annotations

import itertools
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from envhub.domain import Domain
from rlearner_sandbox import NoSandbox, Sandbox, SandboxLimits, seccomp
from rlearner_sandbox.command import free_uid, jail
from rlearner_sandbox.run import id_maps, sealed_file

# programs; cores for numerics
SYSTEM: Final = ("/usr", "/opt", "/sys/devices/system/cpu")
# libraries and commands, names of users and hosts, time, certificates, fonts; no settings of
# services
ETC: Final = (
    "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "passwd", "group", "nsswitch.conf",
    "hosts", "resolv.conf", "host.conf", "gai.conf", "protocols", "services", "localtime",
    "timezone", "ssl/certs", "ssl/openssl.cnf", "ca-certificates", "pki/tls", "pki/ca-trust",
    "crypto-policies", "mime.types", "fonts", "terminfo", "os-release", "python3*", "OpenCL",
)  # fmt: skip
# of ours, also if they are not installed
PACKAGES: Final = ("broker", "envhub", "rlearner_text", "rlearner_sandbox", "rlearner_workers")
# in memory, of each folder that it may write to
SCRATCH_MIB: Final = 1024
BECOME: Final = """import os, sys; uid = int(sys.argv[1]); os.setgroups([])
os.setresgid(uid, uid, uid); os.setresuid(uid, uid, uid); os.execvp(sys.argv[2], sys.argv[2:])"""
# With the host's network come its abstract sockets, which have no file; Landlock (Linux 6.12) keeps
# programs from them: a ruleset of 24 bytes that handles no files and no ports, and scopes abstract
# sockets (1).
SCOPE: Final = """import ctypes, os, sys; call = ctypes.CDLL(None).syscall
if call(444, None, 0, 1) >= 6:
    rules = call(444, (ctypes.c_uint64 * 3)(0, 0, 1), 24, 0)
    if rules < 0 or call(446, rules, 0): sys.exit("Landlock does not work here")
    os.close(rules)
os.execvp(sys.argv[1], sys.argv[1:])"""
_numbers: Final = itertools.count()


@dataclass(frozen=True)
class SandboxedStart:
    """The arguments of ``rlearner_workers.start.start`` for a process in a sandbox."""

    within: list[str]
    uid: int
    files: tuple[int, ...]


@contextmanager
def sandboxed_start(domain: Domain, folder: str | None = None) -> Iterator[SandboxedStart | None]:
    """Yield how to start a domain's processes, None if its isolation is not ``sandbox``.

    Args:
        folder: to work in; None: the hub's.

    Raises:
        NoSandbox: if no sandbox works on this machine; says what to do.
    """
    if domain.isolation != "sandbox":
        yield None
        return
    bwrap = shutil.which("bwrap")
    is_root = os.geteuid() == 0
    if bwrap is None:
        raise NoSandbox("there is no bubblewrap (bwrap) on PATH; run: apt-get install bubblewrap")
    rules = sealed_file(seccomp.program(memory_files=True))
    try:
        limits = SandboxLimits(file_mib=SCRATCH_MIB)
        packages = readable(domain)
        scratch = domain.environment.folders(domain.args)[1]
        within = jail(
            bwrap,
            rules,
            limits,
            root=is_root,
            packages=packages,
            network=domain.section.network,
            scratch=scratch,
            folder=os.path.abspath(folder or os.getcwd()),
        )
        if domain.section.network:
            within += [sys.executable, "-I", "-S", "-c", SCOPE]
        uid = free_uid(os.getpid() * 16 + next(_numbers) % 16, id_maps()) if is_root else 0
        yield SandboxedStart(within, uid, (rules,))
    finally:
        os.close(rules)


def sandboxed_command(sandbox: SandboxedStart | None, command: Sequence[str]) -> list[str]:
    """Return the command that runs a program in a sandbox, as another user if the hub is root."""
    if sandbox is None:
        return list(command)
    become = [sys.executable, "-I", "-S", "-c", BECOME, str(sandbox.uid)] if sandbox.uid else []
    return [*sandbox.within, *become, *command]


def require(domain: Domain) -> None:
    """Check that the sandbox of a domain works on this machine.

    Raises:
        NoSandbox: if it does not; says what to do.
    """
    if domain.isolation == "sandbox":
        try:
            Sandbox()
        except NoSandbox as error:
            key = f"domains.{domain.name}.isolation"
            otherwise = f"or {key}=process, which runs it unprotected"
            raise NoSandbox(f"{key}: sandbox does not work here: {error}; {otherwise}") from None


def readable(domain: Domain) -> list[str]:
    """Return the paths that an environment needs: Python, packages, its code and its data."""
    paths = [*SYSTEM, *_etc_paths(), sys.prefix, sys.base_prefix]
    paths += [
        str(Path(spec.origin).parent)
        for name in PACKAGES
        if (spec := find_spec(name)) and spec.origin
    ]
    for base in domain.environment.__mro__[:-1]:
        paths += _code_of(base.__module__)
    paths += [
        *domain.environment.data_files(domain.args),
        *domain.environment.folders(domain.args)[0],
    ]
    return [
        os.path.abspath(path)
        for path in (*paths, *map(os.path.expanduser, domain.section.readable))
    ]


def _etc_paths() -> list[str]:
    """Return the entries of /etc that programs need, as far as they exist."""
    return [str(path) for name in ETC for path in sorted(Path("/etc").glob(name))]


def _code_of(module: str) -> list[str]:
    """Return the file or the folder of a module's top-level package."""
    top = sys.modules.get(module.partition(".")[0])
    if paths := list(getattr(top, "__path__", ())):
        return [str(path) for path in paths]
    file = getattr(top, "__file__", None)
    return [file] if file else []
