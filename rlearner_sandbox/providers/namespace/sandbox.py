"""A sandbox of the provider ``namespace``."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from broker.system import private_files
from rlearner_sandbox.command import advice
from rlearner_sandbox.providers import archive
from rlearner_sandbox.providers.base import ExecResult, OnOutput, SandboxError, SandboxSpec
from rlearner_sandbox.providers.layers import Image
from rlearner_sandbox.providers.namespace import cgroups, host_layer
from rlearner_sandbox.providers.namespace.forward import Forwarder, endpoint_address
from rlearner_sandbox.providers.namespace.link import Reply
from rlearner_sandbox.providers.namespace.plan import FIRST_UID, RunPlan, StartPlan, TaskPlan
from rlearner_sandbox.providers.streams import OutputPipe
from rlearner_sandbox.providers.trees import merge_layers, remove_tree, tree_bytes
from rlearner_sandbox.run import sealed_file

if TYPE_CHECKING:
    from rlearner_sandbox.providers.namespace.provider import NamespaceProvider

log = logging.getLogger(__name__)

PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
TIMED_OUT: Final = 124
# A machine that is busy may take long; a process that is stuck takes for ever.
START_S: Final = 60.0
KILL_S: Final = 20.0
TASK_S: Final = 300.0
# Between two measurements of what was written, which may take no more than a twentieth of the time.
DISK_WATCH_S: Final = 1.0
# Of commands whose daemons hold their output open.
MAX_OPEN_PIPES: Final = 64


class NamespaceSandbox:
    """See ``EpisodeSandbox``; made by ``NamespaceProvider.start``."""

    def __init__(
        self,
        provider: NamespaceProvider,
        key: int,
        spec: SandboxSpec,
        image: Image,
    ) -> None:
        self.key = key
        self.spec = spec
        self._provider = provider
        self._image = image
        self._folder = provider.folder / f"sandbox-{key}"
        self._start_layer: Path | None = None
        self._is_whole = False  # whether the start layer holds the image, too
        self._generation = 0
        self._ended: asyncio.Event = asyncio.Event()
        self._is_stopped = False
        self._forwarder: Forwarder | None = None
        self._cgroup: Path | None = None
        self._pipes: list[OutputPipe] = []
        self._removals: set[asyncio.Task[None]] = set()
        self._measured_s = 0.0

    # Life

    async def launch(self, source: Path | None = None) -> None:
        """Start its first process. ``source``: a layer that is its own from now on."""
        await self._provider.run_blocking(lambda: self._make_folder(source))
        await self._launch_process()

    def _make_folder(self, source: Path | None) -> None:
        self._folder.mkdir(mode=0o700)
        if source is not None:
            self._start_layer = self._folder / "start"
            private_files.replace(source, self._start_layer)

    async def _launch_process(self) -> None:
        self._generation += 1
        self._ended = asyncio.Event()
        provider = self._provider
        parent = provider.cgroup
        if parent is not None:
            name = f"sandbox-{os.getpid()}-{self.key}"
            cgroup = await provider.run_blocking(
                lambda: cgroups.make_cgroup(parent, name, self.spec)
            )
            self._cgroup = cgroup
        result = await self._try_start()
        if "overlay" in result.get("error", "") and provider.layering == "auto":
            log.warning("no overlay can be mounted here (%s): images are copied", result["error"])
            provider.layering = "copy"
            result = await self._try_start()
        if "error" in result:
            raise SandboxError(_explain_failure(result["error"]))
        if self.spec.network == "endpoint":
            await self._open_endpoint()

    async def _try_start(self) -> dict[str, Any]:
        await self._provider.run_blocking(self._make_layers)
        provider = self._provider
        is_copied = provider.layering == "copy"
        shown = host_layer.shown_folders() if self._image.shows_host else []
        if self.spec.network == "host":
            shown += host_layer.network_files()
        upper = self._written
        plan = StartPlan(
            key=self.key,
            lower=[] if is_copied else [str(layer) for layer in self._lower()],
            upper="" if is_copied else str(upper),
            work="" if is_copied else str(upper.with_name(f"work-{self._generation}")),
            copied=str(upper) if is_copied else "",
            shown=shown,
            workdir=self.spec.workdir,
            has_range=provider.has_range,
            host_network=self.spec.network == "host",
            watched_mib=0 if self._cgroup else self.spec.memory_mib,
            cgroup=str(self._cgroup or ""),
        )
        reply = Reply()
        try:
            await provider.link.post(plan, [reply.fd])
            reply.passed()
            result, _ = await asyncio.wait_for(reply.receive(), START_S)
        except TimeoutError:
            raise SandboxError(f"the sandbox did not start within {START_S:.0f} s") from None
        finally:
            reply.close()
        return result

    @property
    def _written(self) -> Path:
        """The folder of what it has written; with copied images, of everything."""
        return self._folder / f"upper-{self._generation}"

    def _lower(self) -> list[Path]:
        layers = [self._start_layer] if self._start_layer else []
        if not self._is_whole:
            store = self._provider.snapshots
            layers += [store.layer_folder(layer) for layer in self._image.layers]
        return layers

    def _make_layers(self) -> None:
        written = self._written
        if self._provider.layering == "copy":
            if written.exists():
                remove_tree(written)
            merge_layers(self._lower()[::-1], written, keeps_whiteouts=False)
            return
        for path in (written, written.with_name(f"work-{self._generation}")):
            path.mkdir()
            if self._provider.has_range:
                os.chown(path, FIRST_UID, FIRST_UID)
        # The root folder gets the mode of the upper one.
        written.chmod(0o755)

    def note_end(self, key: int) -> None:
        """Note that its first process has ended."""
        if key == self.key:
            self._ended.set()

    async def _end_process(self) -> None:
        provider = self._provider
        if self._forwarder is not None:
            await self._forwarder.stop()
            self._forwarder = None
        for pipe in self._pipes:
            pipe.close()
        self._pipes.clear()
        with contextlib.suppress(SandboxError):
            link = provider.link
            await link.end_sandbox(self.key)
            try:
                await asyncio.wait_for(self._wait_for_end(link), KILL_S)
            except TimeoutError:
                # Without an answer nothing is known of any of its sandboxes.
                link.close()
        if self._cgroup is not None:
            cgroup = self._cgroup
            self._cgroup = None
            await asyncio.to_thread(cgroups.remove_cgroup, cgroup)

    async def _wait_for_end(self, link: Any) -> None:
        while link.is_alive and not self._ended.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), 0.5)

    async def reset(self) -> None:
        """End every process and drop all that was written since the start."""
        self._check_alive()
        await self._end_process()
        old = [self._written, self._written.with_name(f"work-{self._generation}")]
        self._provider.adopt(self, key := self._provider.next_key())
        self.key = key
        await self._launch_process()
        # The removal of many files takes longer than a start.
        task = asyncio.ensure_future(asyncio.to_thread(_remove_all, old))
        self._removals.add(task)
        task.add_done_callback(self._removals.discard)

    async def stop(self) -> None:
        """End every process and remove the sandbox; a second call does nothing."""
        if self._is_stopped:
            return
        self._is_stopped = True
        await self._end_process()
        self._provider.forget(self)
        await asyncio.gather(*self._removals, return_exceptions=True)
        await asyncio.to_thread(remove_tree, self._folder)

    def _check_alive(self) -> None:
        if self._is_stopped:
            raise SandboxError("the sandbox was stopped")
        # Nothing inside can end the first process, so somebody outside has.
        if self._ended.is_set() or not self._provider.link.is_alive:
            raise SandboxError("the sandbox has ended")

    # Commands

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
        self._provider.check_user(user)
        plan = self._plan_command(command, workdir, env, user)
        pipes = [
            OutputPipe("stdout", max_output, on_output),
            OutputPipe("stderr", max_output, on_output),
        ]
        reply = Reply()
        stdin_fd = sealed_file(stdin)
        is_disk_full = asyncio.Event()
        watch = asyncio.ensure_future(self._watch_disk(is_disk_full))
        try:
            try:
                fds = [reply.fd, stdin_fd, pipes[0].write_fd, pipes[1].write_fd]
                await self._provider.link.post(plan, fds)
            finally:
                os.close(stdin_fd)
                for pipe in pipes:
                    pipe.close_write_end()
                reply.passed()
            result, is_timed_out = await self._await_command(reply, timeout_s)
        except BaseException:
            for pipe in pipes:
                pipe.close()
            raise
        finally:
            reply.close()
            watch.cancel()
        outputs = [pipe.finish() for pipe in pipes]
        self._keep_open(pipes)
        if "error" in result:
            raise SandboxError(f"the command did not start: {result['error']}")
        if is_disk_full.is_set():
            limit = f"sandbox: more than {self.spec.disk_mib} MiB written\n"
            outputs[1] += limit.encode()
        return ExecResult(
            exit_code=TIMED_OUT if is_timed_out else int(result["exit"]),
            stdout=outputs[0],
            stderr=outputs[1],
            is_truncated=any(pipe.is_truncated for pipe in pipes),
            timed_out=is_timed_out,
        )

    def _plan_command(
        self,
        command: str | Sequence[str],
        workdir: str | None,
        env: Mapping[str, str] | None,
        user: str | None,
    ) -> RunPlan:
        variables = {"PATH": PATH, "LANG": "C.UTF-8"} | self._image.env
        return RunPlan(
            key=self.key,
            argv=["/bin/sh", "-c", command] if isinstance(command, str) else list(command),
            env=variables | dict(self.spec.env) | dict(env or {}),
            workdir=os.path.join(self.spec.workdir, workdir or ""),
            user=user or self.spec.user or self._image.user or "root",
            processes=self.spec.processes,
            file_bytes=self.spec.disk_mib << 20,
            has_range=self._provider.has_range,
            cgroup=str(self._cgroup or ""),
        )

    async def _await_command(self, reply: Reply, timeout_s: float) -> tuple[dict[str, Any], bool]:
        answer = asyncio.ensure_future(reply.receive())
        try:
            done, _ = await asyncio.wait({answer}, timeout=timeout_s)
            if not done:
                reply.ask_kill()
                await asyncio.wait({answer}, timeout=KILL_S)
                if not answer.done():
                    raise SandboxError("a command that was killed does not end")
            result, _ = answer.result()
            return result, not done
        finally:
            answer.cancel()

    def _keep_open(self, pipes: list[OutputPipe]) -> None:
        """Go on reading for daemons, which a closed pipe would kill."""
        self._pipes = [pipe for pipe in (*self._pipes, *pipes) if not pipe.is_closed]
        while len(self._pipes) > MAX_OPEN_PIPES:
            self._pipes.pop(0).close()

    async def _watch_disk(self, is_full: asyncio.Event) -> None:
        """Kill everything when more was written than allowed, and set ``is_full``."""
        cost_s = 0.0
        if time.monotonic() - self._measured_s < 5 * DISK_WATCH_S:
            await asyncio.sleep(DISK_WATCH_S)
        while True:
            began_s = time.monotonic()
            size = await asyncio.to_thread(tree_bytes, self._written)
            self._measured_s = time.monotonic()
            cost_s = self._measured_s - began_s
            if self._provider.layering != "copy" and size > self.spec.disk_mib << 20:
                is_full.set()
                await self._run_task("signal", number=signal.SIGKILL)
                return
            await asyncio.sleep(max(DISK_WATCH_S, 20 * cost_s))

    # Files

    async def upload(self, source: Path, target: str) -> None:
        """Copy a file or folder of this host to the path ``target`` inside."""
        self._check_alive()
        await asyncio.to_thread(source.resolve, strict=True)
        read_fd, write_fd = os.pipe2(os.O_CLOEXEC)

        def write() -> None:
            with contextlib.suppress(BrokenPipeError), open(write_fd, "wb") as stream:
                archive.write_archive(str(source), stream, links=True)

        path = os.path.join(self.spec.workdir, target)
        result = await self._run_task("unpack", path, fd=read_fd, work=write)
        if "error" in result:
            raise SandboxError(f"upload to {target}: {result['error']}")

    async def download(self, source: str, target: Path, *, max_bytes: int = 64 << 20) -> None:
        """Copy the file or folder ``source`` from inside to ``target`` on this host."""
        self._check_alive()
        read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
        errors: list[Exception] = []

        def read() -> None:
            try:
                with open(read_fd, "rb") as stream:
                    archive.read_archive(stream, str(target), trusted=False, max_bytes=max_bytes)
            except (OSError, ValueError) as error:
                errors.append(error)

        path = os.path.join(self.spec.workdir, source)
        result = await self._run_task("pack", path, fd=write_fd, work=read)
        if "missing" in result or any(isinstance(error, FileNotFoundError) for error in errors):
            raise FileNotFoundError(f"{source} is not there, or is neither a file nor a folder")
        for error in errors:
            if isinstance(error, ValueError):
                raise ValueError(f"download of {source}: {error}")
            raise SandboxError(f"download of {source}: {error}")
        if "error" in result:
            raise SandboxError(f"download of {source}: {result['error']}")

    async def _run_task(
        self,
        task: str,
        argument: str = "",
        *,
        number: int = 0,
        fd: int = -1,
        work: Callable[[], None] | None = None,
    ) -> dict[str, Any]:
        """Have a task done inside, while ``work`` feeds or empties its pipe in a thread."""
        reply = Reply()
        try:
            plan = TaskPlan(key=self.key, task=task, argument=argument, number=number)
            try:
                await self._provider.link.post(plan, [reply.fd, *([fd] if fd >= 0 else [])])
            finally:
                if fd >= 0:
                    os.close(fd)
                reply.passed()
                feeding = asyncio.ensure_future(asyncio.to_thread(work or _do_nothing))
            result, fds = await asyncio.wait_for(reply.receive(), TASK_S)
            await feeding
        except TimeoutError:
            raise SandboxError(f"{task} took more than {TASK_S:.0f} s") from None
        finally:
            reply.close()
        return result | {"fds": fds}

    async def _open_endpoint(self) -> None:
        host, port = endpoint_address(self.spec.endpoint)
        result = await self._run_task("listen", host, number=port)
        if not result["fds"]:
            raise SandboxError(f"the endpoint cannot be reached: {result.get('error')}")
        self._forwarder = Forwarder(host, port)
        listener = socket.socket(fileno=result["fds"][0])
        listener.setblocking(False)
        await self._forwarder.start(listener)

    # Copies

    async def snapshot(self) -> str:
        """Keep what was written so far as an image, until the provider is closed."""
        draft = await self._copy_written()
        store = self._provider.snapshots
        layers = () if self._provider.layering == "copy" else self._image.layers
        layers = () if self._is_whole else layers

        def store_image() -> str:
            layer = store.add_layer(draft)
            return store.add_image(replace(self._image, layers=(layer, *layers)))

        return await self._provider.run_blocking(store_image)

    async def fork(self) -> NamespaceSandbox:
        """Return a new sandbox that starts with what this one has written so far."""
        draft = await self._copy_written()
        provider = self._provider
        copy = NamespaceSandbox(provider, provider.next_key(), self.spec, self._image)
        copy._is_whole = self._is_whole or provider.layering == "copy"
        await provider.launch(copy, draft)
        return copy

    async def _copy_written(self) -> Path:
        self._check_alive()
        draft = self._provider.snapshots.new_draft()
        is_copied = self._provider.layering == "copy"
        layers = [self._start_layer] if self._start_layer and not is_copied else []
        layers.append(self._written)
        # A file that changes while it is copied would be in no state that it ever had.
        await self._run_task("signal", number=signal.SIGSTOP)
        try:
            await self._provider.run_blocking(
                lambda: merge_layers(layers, draft, keeps_whiteouts=not is_copied)
            )
        finally:
            await self._run_task("signal", number=signal.SIGCONT)
        return draft


def _do_nothing() -> None:
    return None


def _remove_all(folders: Sequence[Path]) -> None:
    for folder in folders:
        remove_tree(folder)


def _explain_failure(text: str) -> str:
    """Return why no sandbox can be made here, with what helps."""
    if "clone" in text or "uid_map" in text:
        return advice(text).replace("bubblewrap does not", "namespaces do not")
    return f"the sandbox did not start: {text}"
