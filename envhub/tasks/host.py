"""Starts the sandboxes of tasks; the image of each is prepared once and shared by its episodes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from envhub.tasks.config import EnvironmentTable, NetworkMode
from envhub.tasks.dockerfile import BuildStep, ImagePlan
from envhub.tasks.errors import TaskError
from envhub.tasks.images import HOST
from envhub.tasks.settings import TaskArgs
from rlearner_sandbox.providers.base import EpisodeSandbox, SandboxProvider, SandboxSpec

LOGS = "mkdir -p /logs/agent /logs/artifacts /logs/verifier"


@dataclass(frozen=True)
class SandboxRequest:
    """What a sandbox of a task begins with.

    Attributes:
        plan: its file system.
        env: variables of the task besides those of its image.
        network: what the task declares.
        endpoint: the only address that it reaches; None: as the run says.
    """

    plan: ImagePlan
    table: EnvironmentTable
    env: Mapping[str, str]
    network: NetworkMode | None
    user: str | None = None
    endpoint: str | None = None


class TaskHost:
    """The sandboxes of one event loop.

    Args:
        provider: starts them; closed by ``close``.
    """

    def __init__(self, provider: SandboxProvider) -> None:
        self.provider = provider
        self._images: dict[str, asyncio.Task[str]] = {}
        # whether the tests of a task write a reward where nobody has done anything
        self.controls: dict[str, asyncio.Task[bool]] = {}

    async def start(self, key: str, request: SandboxRequest, args: TaskArgs) -> EpisodeSandbox:
        """Return a sandbox with the files of a task.

        Args:
            key: equal for sandboxes with equal files.

        Raises:
            TaskError: if a step of its Dockerfile fails, or the provider refuses its settings.
            SandboxError: if the provider fails.
        """
        preparation = self._images.get(key)
        if preparation is None or _has_failed(preparation):
            preparation = asyncio.create_task(self._prepare(request, args))
            self._images[key] = preparation
        # shielded: other episodes of the group wait for the same image
        image = await asyncio.shield(preparation)
        sandbox = await self._start(_make_spec(image, request, args))
        try:
            await run_checked(sandbox, LOGS, "the folders for logs")
        except BaseException:
            await sandbox.stop()
            raise
        return sandbox

    async def restart(self, image: str, request: SandboxRequest, args: TaskArgs) -> EpisodeSandbox:
        """Return a sandbox with the files of a snapshot, and none of its processes."""
        return await self._start(_make_spec(image, request, args))

    async def close(self) -> None:
        """Stop every sandbox and forget all images."""
        for task in (*self._images.values(), *self.controls.values()):
            task.cancel()
        self._images.clear()
        self.controls.clear()
        await self.provider.close()

    async def _start(self, spec: SandboxSpec) -> EpisodeSandbox:
        try:
            return await self.provider.start(spec)
        except ValueError as error:
            raise TaskError(f"the provider of sandboxes refuses the task: {error}") from None

    async def _prepare(self, request: SandboxRequest, args: TaskArgs) -> str:
        """Return the image after the steps of a task's Dockerfile."""
        plan = request.plan
        if not plan.steps and not plan.has_loose_files:
            return plan.base
        sandbox = await self._start(_make_spec(plan.base, request, args))
        try:
            if plan.has_loose_files:
                await sandbox.upload(plan.context, plan.workdir)
            for step in plan.steps:
                await self._build(sandbox, step, request)
            return await sandbox.snapshot()
        finally:
            await sandbox.stop()

    async def _build(
        self, sandbox: EpisodeSandbox, step: BuildStep, request: SandboxRequest
    ) -> None:
        plan = request.plan
        if step.kind == "run":
            label = f"{plan.file}:{step.line}: RUN"
            workdir = step.workdir or "/"
            timeout_s = request.table.build_timeout_sec
            await run_checked(sandbox, step.command, label, workdir=workdir, timeout_s=timeout_s)
            return
        for source, target in _copies(plan.context, step):
            await run_checked(sandbox, ["mkdir", "-p", str(PurePosixPath(target).parent)], "COPY")
            await sandbox.upload(source, target)


def _copies(context: Path, step: BuildStep) -> list[tuple[Path, str]]:
    """Return what a COPY copies and where to; a folder's contents, not the folder."""
    pairs = []
    for pattern in step.sources:
        is_all = pattern in (".", "./")
        for source in [context] if is_all else sorted(context.glob(pattern.strip("/"))):
            into = step.target.endswith("/") and not source.is_dir()
            pairs.append((source, f"{step.target}{source.name}" if into else step.target))
    return pairs


async def run_checked(
    sandbox: EpisodeSandbox,
    command: str | list[str],
    label: str,
    *,
    workdir: str = "/",
    timeout_s: float = 60.0,
) -> bytes:
    """Run a command of the task and return its output.

    Raises:
        TaskError: if it fails.
    """
    result = await sandbox.run_command(command, workdir=workdir, timeout_s=timeout_s)
    if result.timed_out:
        raise TaskError(f"{label} did not end within {timeout_s:g} s")
    if result.exit_code:
        lines = (result.stderr or result.stdout).decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "no output")
        raise TaskError(f"{label} ended with exit code {result.exit_code}: {last[:300]}")
    return result.stdout


def _has_failed(task: asyncio.Task[str]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


def _make_spec(image: str, request: SandboxRequest, args: TaskArgs) -> SandboxSpec:
    table = request.table
    network = args.network if request.network != "no-network" else "none"
    return SandboxSpec(
        image=None if image == HOST else image,
        workdir=request.plan.workdir,
        env={**(request.plan.env or {}), **request.env},
        memory_mib=table.memory_mb or args.memory_mib,
        cpus=table.cpus or args.cpus,
        processes=args.processes,
        disk_mib=table.storage_mb or args.disk_mib,
        network="endpoint" if request.endpoint else network,
        endpoint=request.endpoint,
        user=request.user or request.plan.user,
    )
