"""Signs presences, and accepts only those that the announced process signed itself.

The broker's permissions alone do not protect them: JetStream sends a stored message to any subject
that the requester names. What others decide on for long is signed; load, versions and state change
every second and are not.
"""

from __future__ import annotations

import logging
from typing import Final, TypeGuard

import msgspec

from broker.contract import wire
from broker.errors import WireError
from broker.jetstream.bus import Bus

log = logging.getLogger(__name__)

MAX_KNOWN: Final = 10_000


class PresenceSigner:
    """Puts vouchers into this process's presence; a statement is signed once."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._statement = b""
        self._voucher = ""

    def signed(self, presence: wire.Presence) -> wire.Presence:
        """Return the presence with its voucher; without one on brokers without keys."""
        statement = signed_statement(self._bus.run, presence)
        if statement != self._statement:
            self._statement = statement
            self._voucher = self._bus.link.login.vouch(self._bus.run, statement)
        return msgspec.structs.replace(presence, voucher=self._voucher)


class PresenceVerifier:
    """Verifies that presences were written by the processes that they name, each once."""

    def __init__(self, bus: Bus, run: str = "") -> None:
        self._bus = bus
        self._run = run
        self._known: dict[str, tuple[bytes, str]] = {}  # by role.id
        self._warned: set[str] = set()

    def accepts(self, message: wire.Message | None, name: str) -> TypeGuard[wire.Presence]:
        """Return whether a message is the presence of ``role.id``, whose subject or key it has."""
        if not isinstance(message, wire.Presence):
            return False
        if f"{message.role}.{message.id}" != name:
            self._warn(name, f"presence of another process, {message.role}.{message.id}")
            return False
        run = self._run or self._bus.run
        statement = signed_statement(run, message)
        signed = (statement, message.voucher)
        if self._known.get(name) == signed:
            return True
        try:
            self._bus.link.login.check_voucher(run, message.role, statement, message.voucher)
        except WireError as error:
            self._warn(name, f"presence ignored: {error}")
            return False
        if len(self._known) >= MAX_KNOWN:
            self._known.clear()
        self._known[name] = signed
        return True

    def _warn(self, name: str, problem: str) -> None:
        if name not in self._warned and len(self._warned) < MAX_KNOWN:
            self._warned.add(name)
            log.warning("%s: %s", name, problem)


def signed_statement(run: str, presence: wire.Presence) -> bytes:
    """Return the part of a presence that its voucher signs."""
    refusal = presence.refusal
    values = [
        run,
        presence.role,
        presence.id,
        presence.address,
        presence.channel,
        presence.policy,
        presence.serves,
        presence.key,
    ]
    # a refused offer may end the run
    return msgspec.json.encode(
        values if refusal is None else [*values, refusal.epoch, refusal.version, refusal.kind]
    )
