"""A command of rlearner as a child process whose output is JSON lines."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from broker.errors import RlearnerError, UserError
from broker.system.children import spawn
from broker.system.entry import EXIT_STOPPED, EXIT_USER_ERROR
from broker.system.logs import error_of

# `up` gives its learner 30 s for the last checkpoint, and the others 10 s.
STOP_S: Final = 60.0
# After a second signal it kills what is left.
KILL_S: Final = 10.0
POLL_S: Final = 0.2
WARNING: Final = "warning: "


class CommandProcess:
    """A command that is running; it stops cleanly when this process dies.

    Args:
        words: the command and its arguments.
        env: added to the environment.
    """

    def __init__(self, words: Sequence[str], env: Mapping[str, str]) -> None:
        self._errors: list[str] = []
        self._events: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        output = os.pipe()
        errors = os.pipe()
        with os.fdopen(output[1], "wb") as events, os.fdopen(errors[1], "wb") as lines:
            self._child = spawn(
                [sys.executable, "-m", "rlearner.cli", *words],
                events,
                errors=lines,
                env={**os.environ, "RL_LOG_FORMAT": "text", **env},
            )
        self._readers = [
            threading.Thread(target=self._read_events, args=(output[0],), daemon=True),
            threading.Thread(target=self._read_errors, args=(errors[0],), daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def is_running(self) -> bool:
        return self._child.poll() is None

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield the objects that the command prints, until it has ended."""
        while True:
            is_last = not any(reader.is_alive() for reader in self._readers)
            with suppress(queue.Empty):
                while True:
                    yield self._events.get(timeout=0 if is_last else POLL_S)
            if is_last:
                return

    def interrupt(self) -> None:
        """Ask the command to end; the second time it ends at once."""
        if self.is_running:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)

    def stop(self, *, is_interrupted: bool = False) -> None:
        """End the command, and return when it and its children have ended."""
        if not is_interrupted:
            self.interrupt()
        for wait_s in (STOP_S, KILL_S):
            # Ctrl-C while waiting ends it at once.
            with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
                self._child.wait(wait_s)
                return
            self.interrupt()
        self._child.kill()
        self._child.wait()

    def read_outcome(self) -> bool:
        """Return whether the ended command has completed its work; False if it was stopped.

        Raises:
            UserError: with the line that the command printed.
            RlearnerError: if it has failed otherwise.
        """
        code = self._child.wait()
        for reader in self._readers:
            reader.join()
        lines = self._errors
        if code in (0, EXIT_STOPPED):
            return code == 0
        errors = [error for line in lines if (error := error_of(line))]
        if code == EXIT_USER_ERROR and errors:
            raise UserError(errors[-1])
        last = next((line for line in reversed(lines) if line.strip()), "")
        raise RlearnerError(f"rlearner ended with exit code {code}: {(errors or [last])[-1]}")

    def _read_events(self, descriptor: int) -> None:
        with open(descriptor, encoding="utf-8", errors="replace") as stream:
            for line in stream:
                with suppress(ValueError):
                    self._events.put(json.loads(line))

    def _read_errors(self, descriptor: int) -> None:
        with open(descriptor, encoding="utf-8", errors="replace") as stream:
            for line in stream:
                self._errors.append(line.rstrip())
                if line.startswith(WARNING):
                    self._events.put({"event": "warning", "message": line.rstrip()})
