"""A server as a process of this hub that leaves nothing behind; see ``guard``."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from envhub.envs.tool_sources import guard
from envhub.envs.tool_sources.base import FAREWELL_S
from rlearner_workers.limits import how_ended

GUARD: Final = str(Path(guard.__file__))
CHUNK_BYTES: Final = 1 << 16
# of what it prints on stderr, from the end
KEPT_CHUNKS: Final = 4


def guarded(command: Sequence[str]) -> list[str]:
    """Return the command below a guard of this process."""
    return [sys.executable, "-I", "-S", GUARD, str(os.getpid()), *command]


class GuardedProcess:
    """A running command with pipes.

    Attributes:
        reader, writer: of its stdout and stdin.
    """

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        assert process.stdin is not None
        self.reader = process.stdout
        self.writer = process.stdin
        self._process = process
        self._errors: deque[bytes] = deque(maxlen=KEPT_CHUNKS)
        self._reading = asyncio.create_task(self._read_errors())

    @classmethod
    async def start(
        cls, command: Sequence[str], env: Mapping[str, str], cwd: str | None
    ) -> GuardedProcess:
        """Start a command.

        Raises:
            OSError: if no process can be started.
        """
        process = await asyncio.create_subprocess_exec(
            *guarded(command),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=dict(env),
            cwd=cwd,
            start_new_session=True,
        )
        return cls(process)

    def last_error(self) -> str:
        """Return the last line that it printed on stderr."""
        text = b"".join(self._errors).decode("utf-8", "replace").rstrip()
        return text.rpartition("\n")[2].strip()

    async def describe_end(self) -> str:
        """Return how it ended, if it has, and its last words."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FAREWELL_S):
                await self._process.wait()
                await self._reading
        status = self._process.returncode
        if status is None:
            how = "closed its output"
        else:
            # the guard reports signals as a shell does
            how = how_ended(128 - status if 128 < status < 128 + signal.NSIG else status)
        words = self.last_error()
        return f"{how}: {words}" if words else how

    async def close(self) -> None:
        """Let it end when its input does; then kill it, with all that it started."""
        self.writer.close()
        try:
            async with asyncio.timeout(FAREWELL_S):
                await self._process.wait()
        except TimeoutError:
            pass
        finally:
            # also when cancelled
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
            self._reading.cancel()
        await self._process.wait()

    async def _read_errors(self) -> None:
        assert self._process.stderr is not None
        while data := await self._process.stderr.read(CHUNK_BYTES):
            self._errors.append(data)
