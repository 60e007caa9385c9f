"""Names the identity behind each publish or subscription that a nats-server refused, from its log."""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

from broker.identity.accounts import unmap_subject
from broker.identity.key_folder import BrokerUser
from broker.system.visible_text import visible

AGAIN_AFTER_S: Final = 60.0  # the same identity and subject are told once in this time
MOST_BYTES: Final = 1 << 20  # read at once; a flood of refusals must not hold up its reader
MOST_TOLD: Final = 20  # at once
MOST_KNOWN: Final = 10_000
_REFUSED: Final = re.compile(
    rb'(?P<what>Publish|Subscription) Violation.*Subject "(?P<subject>[^"]*)"'
)
_KEY: Final = re.compile(rb"\bU[A-Z2-7]{55}\b")
_ACTS: Final = {"Publish": "publish to", "Subscription": "subscribe to"}

Refusal = tuple[str, str, str]  # public key, Publish or Subscription, subject


class RefusalLog:
    """The new refusals in a server's log, which is rotated at times."""

    def __init__(self, server_log: Path) -> None:
        self._file = server_log
        self._position = 0
        self._inode = 0
        self._told: dict[Refusal, float] = {}
        with suppress(FileNotFoundError):
            status = server_log.stat()
            self._position = status.st_size
            self._inode = status.st_ino

    def news(self, users: Callable[[], Iterable[BrokerUser]]) -> list[str]:
        """Return a line for each identity and subject that was refused since the last call.

        Args:
            users: returns those whom the broker accepts; called if anything was refused.
        """
        refused = Counter(_refusals(self._new_bytes()))
        now = time.monotonic()
        names = {user.public_key: user for user in users()} if refused else {}
        self._told = {
            refusal_key: at for refusal_key, at in self._told.items() if now - at < AGAIN_AFTER_S
        }
        lines = list[str]()
        for refusal, times in refused.items():
            if refusal in self._told or len(lines) == MOST_TOLD or len(self._told) == MOST_KNOWN:
                continue
            self._told[refusal] = now
            key, act, subject = refusal
            often = f" ({times} times)" if times > 1 else ""
            lines.append(
                f"refused: {_identity(key, names.get(key))} may not {_ACTS[act]} {subject}{often}"
            )
        return lines

    def _new_bytes(self) -> bytes:
        """Return what the log has gained up to its last whole line."""
        with suppress(FileNotFoundError), self._file.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_ino != self._inode or status.st_size < self._position:  # rotated
                self._position = 0
                self._inode = status.st_ino
            file.seek(max(self._position, status.st_size - MOST_BYTES))
            start = file.tell()
            data = file.read(MOST_BYTES)
            whole = data[: data.rfind(b"\n") + 1]
            self._position = start + len(whole)
            return whole
        return b""


def _refusals(data: bytes) -> Iterable[Refusal]:
    for line in data.splitlines():
        if (refused := _REFUSED.search(line)) is None:
            continue
        key = _KEY.search(line)
        subject = visible(unmap_subject(refused["subject"].decode("utf-8", "replace")))
        yield (key[0].decode() if key else "", refused["what"].decode(), subject)


def _identity(key: str, user: BrokerUser | None) -> str:
    if user is None:
        return f"key {key}" if key else "a client"
    return " ".join(filter(None, (user.role, user.name, f"of run {user.run}" if user.run else "")))
