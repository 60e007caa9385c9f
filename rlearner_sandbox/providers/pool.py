"""Keeps sandboxes ready, stops forgotten ones, and stops asking a provider that fails.

A pool is a provider itself: it stands between episodes and another one.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import weakref
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from rlearner_sandbox.providers.base import (
    EpisodeSandbox,
    ExecResult,
    OnOutput,
    SandboxError,
    SandboxProvider,
    SandboxSpec,
)

log = logging.getLogger(__name__)

FAILURES: Final = 3
FIRST_PAUSE_S: Final = 1.0
MAX_PAUSE_S: Final = 30.0
# Of different specs, so that a set of thousands of images does not fill the host.
MAX_KINDS: Final = 8


class Breaker:
    """Refuses calls after some failures in a row, for longer and longer; then lets one try."""

    def __init__(self) -> None:
        self._failures = 0
        self._reason = ""
        self._closed_until_s = 0.0

    def check(self) -> None:
        """Raise SandboxError while the provider is not to be asked."""
        wait_s = self._closed_until_s - time.monotonic()
        if wait_s > 0:
            raise SandboxError(
                f"the provider of sandboxes failed {self._failures} times in a row "
                f"({self._reason}); it is asked again in {wait_s:.0f} s"
            )

    def note_success(self) -> None:
        """Note that the provider works."""
        self._failures = 0

    def note_failure(self, reason: str) -> None:
        """Note that it failed."""
        self._failures += 1
        self._reason = reason
        if self._failures >= FAILURES:
            pause_s = FIRST_PAUSE_S * 2.0 ** min(self._failures - FAILURES, 10)
            self._closed_until_s = time.monotonic() + min(pause_s, MAX_PAUSE_S)


class SandboxPool:
    """A provider with sandboxes in reserve.

    Args:
        provider: starts them; closed with the pool.
        warm: sandboxes in reserve of each spec that was asked for lately; 0: none.
        breaker: of the provider.
    """

    def __init__(
        self, provider: SandboxProvider, *, warm: int = 0, breaker: Breaker | None = None
    ) -> None:
        self._provider = provider
        self._warm = warm
        self._breaker = breaker or Breaker()
        # by spec, in the order of use
        self._reserve: dict[str, list[EpisodeSandbox]] = {}
        self._specs: dict[str, SandboxSpec] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._filling: set[str] = set()
        self._is_closed = False
        self._loop: asyncio.AbstractEventLoop | None = None

    async def start(self, spec: SandboxSpec) -> PooledSandbox:
        """Return a running sandbox, at once if there is one in reserve."""
        if self._is_closed:
            raise SandboxError("the pool of sandboxes is closed")
        self._loop = asyncio.get_running_loop()
        kind = json.dumps(asdict(spec) | {"env": dict(spec.env)}, sort_keys=True)
        reserve = self._reserve.pop(kind, [])
        self._reserve[kind] = reserve
        self._specs[kind] = spec
        sandbox = await self._take_living(reserve) or await self.start_new(spec)
        self._refill(kind)
        return PooledSandbox(self, sandbox)

    async def _take_living(self, reserve: list[EpisodeSandbox]) -> EpisodeSandbox | None:
        while reserve:
            sandbox = reserve.pop(0)
            try:
                # It may have died with its provider since.
                await sandbox.run_command("true", timeout_s=10.0)
            except SandboxError:
                await _stop_quietly(sandbox)
                continue
            return sandbox
        return None

    async def start_new(self, spec: SandboxSpec) -> EpisodeSandbox:
        """Start a sandbox, unless the provider has failed too often."""
        self._breaker.check()
        try:
            sandbox = await self._provider.start(spec)
        except SandboxError as error:
            self._breaker.note_failure(str(error))
            raise
        self._breaker.note_success()
        return sandbox

    def note_failure(self, reason: str) -> None:
        """Note that a running sandbox failed."""
        self._breaker.note_failure(reason)

    def _refill(self, kind: str) -> None:
        for old in list(self._reserve)[:-MAX_KINDS]:
            for sandbox in self._reserve.pop(old):
                self._start_task(_stop_quietly(sandbox))
            del self._specs[old]
        if self._warm > len(self._reserve[kind]) and kind not in self._filling:
            self._filling.add(kind)
            self._start_task(self._fill(kind))

    async def _fill(self, kind: str) -> None:
        try:
            while not self._is_closed and len(self._reserve.get(kind, ())) < self._warm:
                if kind not in self._reserve:
                    return
                sandbox = await self.start_new(self._specs[kind])
                if self._is_closed or kind not in self._reserve:
                    await _stop_quietly(sandbox)
                    return
                self._reserve[kind].append(sandbox)
        except (SandboxError, ValueError) as error:
            log.warning("no sandbox in reserve: %s", error)
        finally:
            self._filling.discard(kind)

    def _start_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def stop_forgotten(self, sandbox: EpisodeSandbox) -> None:
        """Stop a sandbox whose user has dropped it without stopping it."""
        if self._loop is not None and not self._loop.is_closed() and not self._is_closed:
            log.warning("a sandbox was dropped without being stopped; it is stopped now")
            self._loop.call_soon_threadsafe(self._start_task, _stop_quietly(sandbox))

    async def close(self) -> None:
        """Stop every sandbox of the provider."""
        self._is_closed = True
        reserve = [sandbox for sandboxes in self._reserve.values() for sandbox in sandboxes]
        self._reserve.clear()
        for sandbox in reserve:
            await _stop_quietly(sandbox)
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._provider.close()


class PooledSandbox:
    """A sandbox that its pool stops if it is forgotten; failures count against its provider."""

    def __init__(self, pool: SandboxPool, sandbox: EpisodeSandbox) -> None:
        self._pool = pool
        self._sandbox = sandbox
        self._forgotten = weakref.finalize(self, pool.stop_forgotten, sandbox)
        self._forgotten.atexit = False

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
        try:
            return await self._sandbox.run_command(
                command,
                workdir=workdir,
                env=env,
                user=user,
                timeout_s=timeout_s,
                stdin=stdin,
                max_output=max_output,
                on_output=on_output,
            )
        except SandboxError as error:
            self._pool.note_failure(str(error))
            raise

    async def upload(self, source: Path, target: str) -> None:
        """Copy a file or folder into it."""
        await self._sandbox.upload(source, target)

    async def download(self, source: str, target: Path, *, max_bytes: int = 64 << 20) -> None:
        """Copy a file or folder out of it."""
        await self._sandbox.download(source, target, max_bytes=max_bytes)

    async def snapshot(self) -> str:
        """Keep what was written so far as an image."""
        return await self._sandbox.snapshot()

    async def fork(self) -> PooledSandbox:
        """Return a new sandbox that starts with what this one has written so far."""
        return PooledSandbox(self._pool, await self._sandbox.fork())

    async def reset(self) -> None:
        """Set it back to its start."""
        await self._sandbox.reset()

    async def stop(self) -> None:
        """Stop it."""
        self._forgotten.detach()
        await self._sandbox.stop()


async def _stop_quietly(sandbox: EpisodeSandbox) -> None:
    try:
        await sandbox.stop()
    except SandboxError as error:
        log.warning("a sandbox could not be stopped: %s", error)
