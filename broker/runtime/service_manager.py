"""Tells the service manager that started this process, such as systemd, how it is: sd_notify(3)."""

from __future__ import annotations

import faulthandler
import logging
import os
import socket
import time
from collections.abc import MutableMapping
from typing import Final

from broker.runtime.health import Health
from broker.system.redaction import redact
from broker.system.visible_text import visible

log = logging.getLogger(__name__)

VARIABLES: Final = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
STATUS_EVERY_S: Final = 2.0
EXTEND_EVERY_S: Final = 5.0
EXTEND_BY_S: Final = 60.0
# A longer drain hangs: TimeoutStopSec ends it.
DRAIN_AT_MOST_S: Final = 3600.0
STATUS_CHARS: Final = 500


class ServiceManager:
    """One listener of ``Health``. It reports while the event loop turns; a blocked one hangs.

    Starting and draining extend the manager's timeouts: loading a model or writing a checkpoint
    takes any time.

    Args:
        address: of the manager's datagram socket: a path, or ``@name`` in the abstract namespace.
        watchdog_s: time without a report after which the manager ends this process; None: it does
            not.
    """

    def __init__(self, address: str, watchdog_s: float | None = None) -> None:
        self._address = address
        self.watchdog_s = watchdog_s
        self._has_joined = self._is_stopping = False
        self._status = self._error = ""
        self._fed = self._extended = self._described = float("-inf")
        self._stopping_since = 0.0

    @classmethod
    def take(cls, environ: MutableMapping[str, str]) -> ServiceManager | None:
        """Return the manager in the environment, and remove it there: no child may speak for us."""
        address, interval, pid = (environ.pop(name, "") for name in VARIABLES)
        if not address:
            return None
        if address[0] not in "/@":
            log.warning(
                "NOTIFY_SOCKET: %s is neither a path nor @name; the service manager hears nothing",
                address,
            )
            return None
        is_watched = interval.isdecimal() and int(interval) > 0 and pid in ("", str(os.getpid()))
        return cls(address, int(interval) / 1e6 if is_watched else None)

    def attach(self, health: Health) -> None:
        """Report a process's health from now on."""
        if self.watchdog_s is not None:
            health.beat_every_s = min(health.beat_every_s, self.watchdog_s / 4)
            # the watchdog's SIGABRT then leaves the stack of every thread in the log
            faulthandler.enable()
        health.listeners.append(self.hear)

    def hear(self, health: Health) -> None:
        """Report what has changed, and that the loop turns."""
        now = time.monotonic()
        lines = []
        joins = (health.has_joined or health.is_ready) and not self._has_joined
        stops = health.state == "draining" and not self._is_stopping
        if joins:
            lines.append("READY=1")
        if stops:
            lines.append("STOPPING=1")
            self._stopping_since = now
        if health.status != self._status and (
            joins or stops or now - self._described >= STATUS_EVERY_S
        ):
            lines.append(f"STATUS={_one_line(health.status)}")
        waits = not (self._has_joined or joins) or health.state == "draining"
        is_stuck = health.state == "draining" and now - self._stopping_since > DRAIN_AT_MOST_S
        if waits and not is_stuck and (stops or now - self._extended >= EXTEND_EVERY_S):
            lines.append(f"EXTEND_TIMEOUT_USEC={int(EXTEND_BY_S * 1e6)}")
        if (
            self.watchdog_s is not None
            and now - self._fed >= self.watchdog_s / 2 - health.beat_every_s / 2
        ):
            lines.append("WATCHDOG=1")
        if not lines or not self._send(lines):
            return
        self._has_joined = self._has_joined or joins
        self._is_stopping = self._is_stopping or stops
        names = {line.partition("=")[0] for line in lines}
        if "STATUS" in names:
            self._status = health.status
            self._described = now
        if "EXTEND_TIMEOUT_USEC" in names:
            self._extended = now
        if "WATCHDOG" in names:
            self._fed = now

    def say(self, status: str) -> None:
        """Report a last line, for example the error that ends this process."""
        self._send([f"STATUS={_one_line(status)}"])

    def _send(self, lines: list[str]) -> bool:
        """Send one datagram without waiting; return whether it was taken."""
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        try:
            with socket.socket(
                socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
            ) as out:
                out.sendto("\n".join(lines).encode("utf-8", "replace"), address)
        except BlockingIOError:
            # Its queue is full: the next beat tries again.
            return False
        except OSError as error:
            if self._error != str(error):
                self._error = str(error)
                log.warning(
                    "the service manager at %s does not listen: %s",
                    self._address,
                    error.strerror or error,
                )
            return False
        return True


def _one_line(text: str) -> str:
    """Return a line that holds no secret and cannot carry a second assignment."""
    return visible(redact(" ".join(text.split())))[:STATUS_CHARS]
