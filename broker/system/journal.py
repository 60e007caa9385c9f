"""Sends log records to the systemd journal with fields: ``journalctl RL_RUN=lake RL_ROLE=envhub``.

The native protocol, because a line behind a ``<3>`` prefix has a priority but no fields, and a
traceback would become one entry per line. https://systemd.io/JOURNAL_NATIVE_PROTOCOL
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Callable, Mapping
from typing import Final

SOCKET: Final = "/run/systemd/journal/socket"
ERROR_LEVEL: Final = "<3>"  # at the start of a line to stderr: the priority of an error
_PRIORITIES: Final = (
    (logging.CRITICAL, 2),
    (logging.ERROR, 3),
    (logging.WARNING, 4),
    (logging.INFO, 6),
)


def is_behind_stderr() -> bool:
    """Return whether stderr is the journal's stream, and the journal takes records here."""
    device, _, inode = os.environ.get("JOURNAL_STREAM", "").partition(":")
    try:
        status = os.fstat(2)
        return f"{status.st_dev}:{status.st_ino}" == f"{device}:{inode}" and os.path.exists(SOCKET)
    except OSError:
        return False


class JournalHandler(logging.Handler):
    """Sends one entry per record; time, host and process are the journal's own fields.

    Args:
        identity: returns run, role and id, which become ``RL_RUN``, ``RL_ROLE`` and ``RL_ID``.
        otherwise: handles a record that the journal does not take, such as one beyond a datagram's
            size.
    """

    def __init__(
        self, identity: Callable[[], Mapping[str, str]], otherwise: logging.Handler
    ) -> None:
        super().__init__()
        self._identity = identity
        self._otherwise = otherwise

    def emit(self, record: logging.LogRecord) -> None:
        """Send a record."""
        try:
            self._send(self._entry(record))
        except OSError:
            self._otherwise.handle(record)
        # Arguments may not fit their format; every logging handler reports that and goes on.
        except Exception:  # noqa: BLE001
            self.handleError(record)

    def _entry(self, record: logging.LogRecord) -> bytes:
        fields = {
            "MESSAGE": self.format(record),
            "PRIORITY": str(
                next((number for level, number in _PRIORITIES if record.levelno >= level), 7)
            ),
            "SYSLOG_IDENTIFIER": os.path.basename(sys.argv[0]) or "rlearner",
            "CODE_FILE": record.pathname,
            "CODE_LINE": str(record.lineno),
            "CODE_FUNC": record.funcName or "",
            "LOGGER": record.name,
            **{
                f"RL_{name.upper()}": value
                for name, value in self._identity().items()
                if value != "-"
            },
        }
        return b"".join(map(_format_field, fields.items()))

    def _send(self, entry: bytes) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as out:
            out.sendto(entry, SOCKET)


def _format_field(item: tuple[str, str]) -> bytes:
    """Return ``NAME=value``, or name, length and bytes if the value has several lines."""
    name = item[0].encode()
    value = item[1].encode("utf-8", "replace")
    if b"\n" not in value:
        return name + b"=" + value + b"\n"
    return name + b"\n" + len(value).to_bytes(8, "little") + value + b"\n"
