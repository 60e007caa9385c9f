"""What every process does the same way: exit codes, signals, drain, logging, uvloop, joining a run, presence, metrics."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

from broker import wire
from broker.jetstream import Bus
from broker.presence import Roster


class Stop:
    """Asked to end: by SIGTERM or SIGINT, by the operator's desired state, or by the process itself.

    The first asks for a drain; a second signal exits at once with 130.
    """

    asked: asyncio.Event
    reason: str

    def request(self, reason: str) -> None: ...


def main(role: str, body: Callable[[Stop], Coroutine[Any, Any, None]]) -> int:
    """Run a process's coroutine on uvloop until it returns; the exit code.

    0: done or drained. 2: UserError, printed as one line ``error: …`` on stderr without a traceback.
    1: anything else, with a traceback. Logs go to stderr, one line each: time, level, run, role, id, message, key=value.
    """
    raise NotImplementedError


def add_join_options(parser: argparse.ArgumentParser) -> None:
    """--broker (RL_BROKER, nats://127.0.0.1:4222), --run (RL_RUN, else the one running), --id, --connect-deadline, --log-level."""


@dataclass
class Member:
    """A process that joined a run."""

    bus: Bus
    spec: wire.RunSpec
    id: str
    role: str
    stop: Stop
    roster: Roster

    def announce(self, describe: Callable[[], wire.Presence]) -> None:
        """Start putting presence every second."""

    def poke(self) -> None:
        """Put presence now."""

    def report(self, values: Callable[[], dict[str, float]], text: Callable[[], dict[str, str]] | None = None) -> None:
        """Publish metrics every second from now on."""


def join(role: str, options: argparse.Namespace, stop: Stop) -> AbstractAsyncContextManager[Member]:
    """Connect, wait for the RunSpec, refuse another wire version, follow the desired state; undo all of it on exit.

    Without --run it waits until exactly one run on the broker is not stopped. Ends quietly when ``stop`` is asked meanwhile.

    Raises:
        UserError: several runs to choose from (names them), another wire version, bad option.
    """
    raise NotImplementedError
