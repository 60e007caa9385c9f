"""The providers ``podman`` and ``docker``: each sandbox is a container, by the tool's commands."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import resource
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from rlearner_sandbox.providers import archive
from rlearner_sandbox.providers.base import ExecResult, OnOutput, SandboxError, SandboxSpec
from rlearner_sandbox.providers.owner import OwnedFolder, default_folder, remove_leftovers
from rlearner_sandbox.providers.renamed import rename_members
from rlearner_sandbox.providers.streams import OutputPipe
from rlearner_sandbox.run import sealed_file

log = logging.getLogger(__name__)

LABEL: Final = "rlearner.owner"
TIMED_OUT: Final = 124
# The tool itself failed: podman and docker alike.
TOOL_FAILED: Final = 125
TOOL_S: Final = 120.0
KILL_S: Final = 20.0
_MIB: Final = 1 << 20
# Each command is in a session of its own and writes its number to a file, by which it is ended.
_WRAPPED: Final = 'echo $$ > "$1"; shift; exec "$@"'
# Process 1 without handlers, so that no signal from inside ends it; it reaps orphans.
_FIRST: Final = "while :; do sleep 1000 & wait; done"
_MISSING: Final = re.compile(rb"no such (file|path)|could not find|does not exist|not found", re.I)


@dataclass(frozen=True)
class ContainerOutput:
    """How a call of the tool ended."""

    exit_code: int
    stdout: bytes
    stderr: bytes


class ContainerProvider:
    """Starts containers.

    Args:
        tool: the program, by name or path.
        folder: where the locks of living processes are; None: in this user's XDG_STATE_HOME.

    Raises:
        ValueError: if there is no such program.
    """

    def __init__(self, tool: str, folder: Path | str | None = None) -> None:
        path = shutil.which(tool)
        if path is None:
            raise ValueError(f"there is no {tool} on PATH; install it: apt-get install {tool}")
        self.tool = path
        self._state = Path(folder) if folder else default_folder()
        self._owner: OwnedFolder | None = None
        self._images: set[str] = set()
        self._opening = asyncio.Lock()

    async def start(self, spec: SandboxSpec) -> ContainerSandbox:
        """Return a running container, see ``SandboxProvider``."""
        if spec.image is None:
            raise ValueError(
                f"image: none is not allowed; the provider {os.path.basename(self.tool)} needs the "
                "name of an image of its store, or the folder of a root file system"
            )
        if spec.network == "endpoint":
            raise ValueError(
                "network: 'endpoint' is not allowed with containers; the provider namespace has it"
            )
        owner = await self._open()
        name = f"rlearner-{owner.id}-{secrets.token_hex(6)}"
        sandbox = ContainerSandbox(self, name, spec)
        try:
            await sandbox.launch(spec.image)
        except BaseException:
            await sandbox.stop()
            raise
        return sandbox

    @property
    def owner_id(self) -> str:
        """The label of this process's containers."""
        assert self._owner is not None
        return self._owner.id

    async def _open(self) -> OwnedFolder:
        async with self._opening:
            if self._owner is None:
                self._state.mkdir(parents=True, exist_ok=True, mode=0o700)
                await asyncio.to_thread(self._remove_leftovers)
                self._owner = OwnedFolder(self._state)
            return self._owner

    def _remove_leftovers(self) -> None:
        """Remove the containers and images of processes that have ended."""
        remove_leftovers(self._state)
        alive = {path.name for path in (self._state / "live").glob("*")}
        for kind, remove in (("ps", self.remove_words), ("images", ["rmi", "--force"])):
            for name, owner in self._list_owned(kind):
                if owner not in alive:
                    log.warning("removed %s, which a process that has ended left", name)
                    self._call_blocking([*remove, name])

    @property
    def remove_words(self) -> list[str]:
        """The words that remove a container at once."""
        # docker kills at once, podman after ten seconds.
        is_docker = os.path.basename(self.tool) == "docker"
        return ["rm", "--force", "--volumes", *([] if is_docker else ["--time", "0"])]

    def _list_owned(self, kind: str) -> list[tuple[str, str]]:
        scope = ["-a"] if kind == "ps" else []
        form = f'{{{{.ID}}}} {{{{.Label "{LABEL}"}}}}'
        if kind == "images":
            form = "{{.ID}} {{.Repository}}"
        words = [kind, *scope, "--filter", f"label={LABEL}", "--format", form]
        result = self._call_blocking(words)
        pairs = [line.split() for line in result.stdout.decode(errors="replace").splitlines()]
        return [(pair[0], pair[1].rpartition("-")[2]) for pair in pairs if len(pair) == 2]

    def _call_blocking(self, words: Sequence[str]) -> ContainerOutput:
        try:
            result = subprocess.run(
                [self.tool, *words], capture_output=True, timeout=TOOL_S, stdin=subprocess.DEVNULL
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise SandboxError(f"{self.tool} {words[0]}: {error}") from None
        return ContainerOutput(result.returncode, result.stdout, result.stderr)

    async def call(
        self, words: Sequence[str], *, stdin: IO[bytes] | None = None, check: bool = True
    ) -> ContainerOutput:
        """Run the tool.

        Raises:
            SandboxError: if it fails or hangs.
        """
        try:
            process = await asyncio.create_subprocess_exec(
                self.tool,
                *words,
                stdin=stdin or asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
        except OSError as error:
            raise SandboxError(f"{self.tool} cannot be started: {error}") from None
        try:
            stdout, stderr = await asyncio.wait_for(process.communicate(), TOOL_S)
        except TimeoutError:
            raise SandboxError(f"{self.tool} {words[0]} took more than {TOOL_S:.0f} s") from None
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
        if check and process.returncode:
            text = " ".join(stderr.decode(errors="replace").split())[-300:]
            raise SandboxError(f"{os.path.basename(self.tool)} {words[0]} failed: {text}")
        return ContainerOutput(process.returncode or 0, stdout, stderr)

    async def find_image(self, image: str) -> str:
        """Return the name of an image of the tool's store.

        Raises:
            ValueError: if it is not there; it is never pulled.
        """
        if os.path.isabs(image):
            return image
        if image not in self._images:
            result = await self.call(["image", "inspect", image], check=False)
            if result.exit_code:
                raise ValueError(
                    f"image: {image!r} is not in the store of {os.path.basename(self.tool)} on "
                    "this host; load it first"
                )
            self._images.add(image)
        return image

    def note_image(self, image: str) -> None:
        """Note that an image is in the store."""
        self._images.add(image)

    async def close(self) -> None:
        """Remove every container and snapshot of this process."""
        if self._owner is None:
            return
        for kind, remove in (("ps", self.remove_words), ("images", ["rmi", "--force"])):
            owned = await asyncio.to_thread(self._list_owned, kind)
            names = [name for name, owner in owned if owner == self._owner.id]
            if names:
                await self.call([*remove, *names], check=False)
        await asyncio.to_thread(self._owner.release)
        self._owner = None


class PodmanProvider(ContainerProvider):
    """Containers of podman, rootless where this process is not root."""

    def __init__(self, tool: str = "podman", folder: str | None = None) -> None:
        super().__init__(tool, folder)


class DockerProvider(ContainerProvider):
    """Containers of docker. Who may use its daemon is root on its host."""

    def __init__(self, tool: str = "docker", folder: str | None = None) -> None:
        super().__init__(tool, folder)


class ContainerSandbox:
    """A container, see ``EpisodeSandbox``."""

    def __init__(self, provider: ContainerProvider, name: str, spec: SandboxSpec) -> None:
        self._provider = provider
        self._name = name
        self._spec = spec
        self._image = ""
        self._is_stopped = False

    async def launch(self, image: str) -> None:
        """Create and start the container."""
        self._image = await self._provider.find_image(image)
        spec = self._spec
        variables = [part for pair in spec.env.items() for part in ("--env", "=".join(pair))]
        rootfs = ["--rootfs", f"{self._image}:O"] if os.path.isabs(self._image) else [self._image]
        await self._provider.call(
            [
                "run", "--detach", "--name", self._name,
                "--label", f"{LABEL}={self._provider.owner_id}",
                "--network", "none" if spec.network == "none" else "host",
                "--memory", f"{spec.memory_mib}m", "--cpus", str(spec.cpus),
                "--pids-limit", str(spec.processes), *_limits(spec), "--cap-drop", "ALL",
                *(part for name in CAPABILITIES for part in ("--cap-add", name)),
                "--security-opt", "no-new-privileges", "--pull", "never",
                "--entrypoint", "/bin/sh", *variables, *rootfs,
                "-c", _FIRST,
            ]
        )  # fmt: skip
        await self._provider.call(["exec", self._name, "mkdir", "-p", spec.workdir])

    def _check_alive(self) -> None:
        if self._is_stopped:
            raise SandboxError("the sandbox was stopped")

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
        """Run a command to its end, see ``EpisodeSandbox.run_command``."""
        self._check_alive()
        mark = f"/tmp/.command-{secrets.token_hex(8)}"
        folder = os.path.join(self._spec.workdir, workdir or "")
        words = ["exec", "--interactive", "--workdir", folder]
        chosen = user or self._spec.user
        words += ["--user", chosen] if chosen else []
        words += [part for pair in (env or {}).items() for part in ("--env", "=".join(pair))]
        argv = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)
        words += [self._name, "/bin/sh", "-c", _WRAPPED, "sh", mark, *argv]
        pipes = [
            OutputPipe("stdout", max_output, on_output),
            OutputPipe("stderr", max_output, on_output),
        ]
        stdin_fd = sealed_file(stdin)
        try:
            process = await asyncio.create_subprocess_exec(
                self._provider.tool,
                *words,
                stdin=stdin_fd,
                stdout=pipes[0].write_fd,
                stderr=pipes[1].write_fd,
            )
        except OSError as error:
            for pipe in pipes:
                pipe.close()
            raise SandboxError(f"{self._provider.tool} cannot be started: {error}") from None
        finally:
            os.close(stdin_fd)
            for pipe in pipes:
                pipe.close_write_end()
        try:
            is_timed_out = await self._wait_for(process, mark, timeout_s)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            for pipe in pipes:
                pipe.close()
            await self._kill_command(mark)
            raise
        stdout, stderr = (pipe.finish() for pipe in pipes)
        for pipe in pipes:
            pipe.close()
        if process.returncode in (TOOL_FAILED, 255) or (not is_timed_out and process.returncode):
            await self._check_running(stderr)
        return ExecResult(
            exit_code=TIMED_OUT if is_timed_out else process.returncode or 0,
            stdout=stdout,
            stderr=stderr,
            is_truncated=any(pipe.is_truncated for pipe in pipes),
            timed_out=is_timed_out,
        )

    async def _wait_for(
        self, process: asyncio.subprocess.Process, mark: str, timeout_s: float
    ) -> bool:
        try:
            await asyncio.wait_for(process.wait(), timeout_s)
        except TimeoutError:
            await self._kill_command(mark)
            try:
                await asyncio.wait_for(process.wait(), KILL_S)
            except TimeoutError:
                process.kill()
            return True
        return False

    async def _kill_command(self, mark: str) -> None:
        """Kill a command and its descendants; what it has detached from itself lives on."""
        with contextlib.suppress(SandboxError):
            await self._provider.call(
                ["exec", "--user", "0", self._name, "/bin/sh", "-c", KILL_SCRIPT, "sh", mark],
                check=False,
            )

    async def _check_running(self, stderr: bytes) -> None:
        """Raise SandboxError if the container is gone, so that its command did not just fail."""
        form = "{{.State.Running}}"
        words = ["container", "inspect", "--format", form, self._name]
        result = await self._provider.call(words, check=False)
        if result.stdout.strip() != b"true":
            text = " ".join(stderr.decode(errors="replace").split())[-200:]
            raise SandboxError(f"the container has ended: {text}")

    async def upload(self, source: Path, target: str) -> None:
        """Copy a file or folder of this host to the path ``target`` inside."""
        self._check_alive()
        path = os.path.join("/", self._spec.workdir, target)
        parent, name = os.path.split(path.rstrip("/"))
        await self._provider.call(["exec", "--user", "0", self._name, "mkdir", "-p", parent])
        with tempfile.TemporaryFile() as packed, tempfile.TemporaryFile() as renamed:

            def pack() -> None:
                archive.write_archive(str(source), packed, links=True)
                packed.seek(0)
                rename_members(packed, renamed, archive.ROOT, name)
                renamed.seek(0)

            await asyncio.to_thread(pack)
            await self._provider.call(["cp", "-", f"{self._name}:{parent}"], stdin=renamed)

    async def download(self, source: str, target: Path, *, max_bytes: int = 64 << 20) -> None:
        """Copy the file or folder ``source`` from inside to ``target`` on this host."""
        self._check_alive()
        path = os.path.join("/", self._spec.workdir, source)
        process = await asyncio.create_subprocess_exec(
            self._provider.tool,
            "cp",
            f"{self._name}:{path}",
            "-",
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            stdin=asyncio.subprocess.DEVNULL,
        )
        assert process.stdout is not None
        assert process.stderr is not None
        with tempfile.TemporaryFile() as packed, tempfile.TemporaryFile() as renamed:
            try:
                total = 0
                while piece := await process.stdout.read(1 << 16):
                    total += len(piece)
                    if total > 2 * max_bytes + (64 << 20):
                        raise ValueError(f"download of {source}: more than {max_bytes} bytes")
                    packed.write(piece)
                stderr = await process.stderr.read()
                await process.wait()
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
            if process.returncode:
                if _MISSING.search(stderr):
                    raise FileNotFoundError(f"{source} is not there")
                raise SandboxError(f"download of {source}: {stderr.decode(errors='replace')}")
            packed.seek(0)

            def unpack() -> None:
                rename_members(packed, renamed, None, archive.ROOT)
                renamed.seek(0)
                archive.read_archive(renamed, str(target), trusted=False, max_bytes=max_bytes)

            await asyncio.to_thread(unpack)
            if not await asyncio.to_thread(os.path.lexists, target):
                raise FileNotFoundError(f"{source} is neither a file nor a folder")

    async def snapshot(self) -> str:
        """Keep what was written so far as an image of the tool's store."""
        self._check_alive()
        if os.path.isabs(self._image):
            raise ValueError("snapshot: a container over a folder cannot be committed")
        name = f"localhost/rlearner-snapshot-{secrets.token_hex(6)}-{self._provider.owner_id}"
        change = f"LABEL {LABEL}={self._provider.owner_id}"
        await self._provider.call(["commit", "--change", change, self._name, name])
        self._provider.note_image(name)
        return name

    async def fork(self) -> ContainerSandbox:
        """Return a new container that starts with what this one has written so far."""
        image = await self.snapshot()
        name = f"rlearner-{self._provider.owner_id}-{secrets.token_hex(6)}"
        copy = ContainerSandbox(self._provider, name, self._spec)
        try:
            await copy.launch(image)
        except BaseException:
            await copy.stop()
            raise
        return copy

    async def reset(self) -> None:
        """Replace the container by a new one."""
        self._check_alive()
        await self._remove()
        await self.launch(self._image)

    async def stop(self) -> None:
        """Remove the container; a second call does nothing."""
        if not self._is_stopped:
            self._is_stopped = True
            await self._remove()

    async def _remove(self) -> None:
        await self._provider.call([*self._provider.remove_words, self._name], check=False)


def _limits(spec: SandboxSpec) -> list[str]:
    """Return the options that limit a container's processes."""
    limits = {"fsize": spec.disk_mib * _MIB}
    # The tool's own defaults may exceed what this process may give.
    for name, kind in (("nofile", resource.RLIMIT_NOFILE), ("nproc", resource.RLIMIT_NPROC)):
        hard = resource.getrlimit(kind)[1]
        if hard != resource.RLIM_INFINITY:
            limits[name] = hard
    return [part for name, most in limits.items() for part in ("--ulimit", f"{name}={most}:{most}")]


CAPABILITIES: Final = (
    "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID", "NET_BIND_SERVICE",
)  # fmt: skip
# Descendants by their parents, since a command may have made groups and sessions of its own.
KILL_SCRIPT: Final = """
children() {
  for folder in /proc/[0-9]*; do
    line=$(cat $folder/stat 2>/dev/null) || continue
    set -- ${line##*) }
    if [ "$2" = "$parent" ]; then echo ${folder#/proc/}; fi
  done
}
read first < "$1"; rm -f "$1"; pending=$first; all=
while [ -n "$pending" ]; do
  next=
  for parent in $pending; do
    kill -STOP $parent 2>/dev/null; all="$all $parent"; next="$next $(children)"
  done
  pending=$(echo $next)
done
kill -KILL $all 2>/dev/null; true
"""
