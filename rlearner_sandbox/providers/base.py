"""What an environment asks of a sandbox of any provider.

A provider starts sandboxes: folders of their own over read-only layers, in which commands run. A
sandbox lives as long as an episode; it can be copied and set back to what it was at its start.

What a command does is its own affair and comes back as an ``ExecResult``. What the provider itself
fails at (a killed daemon, a lost host, a full disk) is raised as ``SandboxError`` and never becomes
the reward of a policy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

Stream = Literal["stdout", "stderr"]
OnOutput = Callable[[Stream, bytes], None]
Network = Literal["none", "endpoint", "host"]


class SandboxError(Exception):
    """Raised when the provider failed; an outage of infrastructure, never a reward of zero."""


@dataclass(frozen=True)
class SandboxSpec:
    """What a sandbox holds, and how much it may use.

    Attributes:
        image: a folder with a root file system, or the digest (``sha256:…``) of built layers;
            None: the host's own system, read-only.
        workdir: the folder in which commands run; it is made if it is not there.
        env: variables of every command.
        memory_mib: memory of all its processes together.
        cpus: processors that they share.
        processes: most processes and threads at once.
        disk_mib: most that the sandbox may write in all.
        network: ``none``: only its own loopback; ``endpoint``: nothing but ``endpoint``; ``host``:
            the host's network.
        endpoint: the address (``http://host:port``) that ``network="endpoint"`` makes reachable
            under the same address from inside.
        user: the user of commands; None: the image's first user (root, without its privileges).
    """

    image: str | None = None
    workdir: str = "/work"
    env: Mapping[str, str] = field(default_factory=dict)
    memory_mib: int = 2048
    cpus: float = 1.0
    processes: int = 256
    disk_mib: int = 1024
    network: Network = "none"
    endpoint: str | None = None
    user: str | None = None


@dataclass(frozen=True)
class ExecResult:
    """How a command ended.

    Attributes:
        exit_code: 128 and more: the number of the signal that killed it; 124 if it timed out.
        is_truncated: whether it wrote more than ``max_output`` bytes to one of its streams; the
            rest was read and dropped.
        timed_out: whether it was killed, with all that it started, because its time was over.
    """

    exit_code: int
    stdout: bytes
    stderr: bytes
    is_truncated: bool = False
    timed_out: bool = False


class EpisodeSandbox(Protocol):
    """A running sandbox. Every method raises SandboxError when the provider fails."""

    async def run_command(
        self,
        command: str | Sequence[str],
        *,
        workdir: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        timeout_s: float = 60.0,
        stdin: bytes = b"",
        max_output: int = 1 << 20,
        on_output: OnOutput | None = None,
    ) -> ExecResult:
        """Run a command to its end.

        Args:
            command: a line for ``/bin/sh``, or a program and its arguments.
            workdir: its folder; None: the sandbox's.
            env: further variables, which go before the sandbox's.
            user: its user; None: the sandbox's.
            timeout_s: seconds after which it is killed with all that it started.
            max_output: bytes that are kept of each stream.
            on_output: called with each piece of output as it comes, up to ``max_output``.
        """
        ...

    async def upload(self, source: Path, target: str) -> None:
        """Copy a file or folder of this host to the path ``target`` inside.

        Links are copied as links and devices are left out; a link inside never leads the copy
        out of the sandbox.
        """
        ...

    async def download(self, source: str, target: Path, *, max_bytes: int = 64 << 20) -> None:
        """Copy the file or folder ``source`` from inside to ``target`` on this host.

        Only regular files and folders come out; links and devices are left out.

        Raises:
            FileNotFoundError: if ``source`` is not there, or is neither a file nor a folder.
            ValueError: if it holds more than ``max_bytes``.
        """
        ...

    async def snapshot(self) -> str:
        """Keep what was written so far; return a digest that a spec's ``image`` may name."""
        ...

    async def fork(self) -> EpisodeSandbox:
        """Return a new sandbox that starts with what this one has written so far."""
        ...

    async def reset(self) -> None:
        """End every process and drop all that was written since the start."""
        ...

    async def stop(self) -> None:
        """End every process and remove the sandbox; a second call does nothing."""
        ...


class SandboxProvider(Protocol):
    """Starts sandboxes. A provider is shared by the episodes of a process."""

    async def start(self, spec: SandboxSpec) -> EpisodeSandbox:
        """Return a running sandbox.

        Raises:
            ValueError: if the provider cannot honour the spec, naming the key.
            SandboxError: if the provider fails.
        """
        ...

    async def close(self) -> None:
        """Stop every sandbox of this provider and leave nothing behind."""
        ...
