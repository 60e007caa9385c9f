"""The sandboxes of a hub, by the session of who asked for them."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable

from rlearner_sandbox.hub.wire import SESSION_S
from rlearner_sandbox.providers.base import (
    EpisodeSandbox,
    SandboxError,
    SandboxProvider,
    SandboxSpec,
)

log = logging.getLogger(__name__)


class HubFull(SandboxError):
    """Raised when the hub has as many sandboxes as it may."""


class Sessions:
    """Sandboxes that live as long as their session is heard from.

    Args:
        most: sandboxes at once.
    """

    def __init__(
        self,
        provider: SandboxProvider,
        most: int,
        *,
        session_s: float = SESSION_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._provider = provider
        self._most = most
        self._session_s = session_s
        self._clock = clock
        self._heard: dict[str, float] = {}
        self._sandboxes: dict[str, tuple[str, EpisodeSandbox]] = {}
        self._starting = 0

    def note_sign(self, session: str) -> None:
        """Note that a session is alive."""
        self._heard[session] = self._clock()

    def __len__(self) -> int:
        return len(self._sandboxes) + self._starting

    async def start(self, session: str, spec: SandboxSpec) -> str:
        """Start a sandbox and return its id."""
        return await self._admit(session, lambda: self._provider.start(spec))

    async def fork(self, session: str, name: str) -> str:
        """Start a copy of a sandbox and return its id."""
        sandbox = self.find(session, name)
        return await self._admit(session, sandbox.fork)

    async def _admit(self, session: str, start: Callable[[], Awaitable[EpisodeSandbox]]) -> str:
        if len(self) >= self._most:
            raise HubFull(f"the hub has {self._most} sandboxes, and no more may be")
        self._starting += 1
        try:
            sandbox = await start()
        finally:
            self._starting -= 1
        name = secrets.token_hex(16)
        self._sandboxes[name] = (session, sandbox)
        return name

    def find(self, session: str, name: str) -> EpisodeSandbox:
        """Return a sandbox of a session.

        Raises:
            KeyError: if it has none of that id.
        """
        owner, sandbox = self._sandboxes[name]
        if owner != session:
            raise KeyError(name)
        return sandbox

    async def stop(self, session: str, name: str) -> None:
        """Stop a sandbox."""
        sandbox = self.find(session, name)
        del self._sandboxes[name]
        await sandbox.stop()

    async def end_session(self, session: str) -> int:
        """Stop the sandboxes of a session and return how many they were."""
        self._heard.pop(session, None)
        names = [name for name, (owner, _) in self._sandboxes.items() if owner == session]
        stopped = [self._sandboxes.pop(name)[1] for name in names]
        results = await asyncio.gather(
            *(sandbox.stop() for sandbox in stopped), return_exceptions=True
        )
        for result in results:
            if isinstance(result, Exception):
                log.warning("a sandbox could not be stopped: %s", result)
        return len(names)

    async def end_silent(self) -> int:
        """End the sessions that were silent for too long; return how many sandboxes they had."""
        limit = self._clock() - self._session_s
        silent = [session for session, heard in self._heard.items() if heard < limit]
        total = 0
        for session in silent:
            total += await self.end_session(session)
        if total:
            log.warning("stopped %d sandboxes of clients that have gone silent", total)
        return total
