"""Named API keys of a user on a machine, hashed in a private file, with limits and expiry."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import msgspec

from broker.contract.streams import check_token
from broker.errors import ConfigError, UserError
from broker.system.locks import lock
from broker.system.private_files import private_write
from rlearner_text.openai.api_keys import key_file

log = logging.getLogger(__name__)

FILE: Final = "keys.json"
# Name of the key without name: RL_API_KEY, or the generated one.
DEFAULT: Final = "default"
MOST_KEYS: Final = 256  # each is compared with every request
MOST_BYTES: Final = 1 << 20
LOCK_WITHIN_S: Final = 10.0


@dataclass(frozen=True)
class NamedKey:
    """One key; 0 as a limit means none.

    Attributes:
        sha256: hash of the key, hexadecimal; 32 random bytes need no salt.
        expires_at: seconds since the epoch.
        requests_per_minute: of one server.
        tokens_per_minute: of prompts and answers, of one server.
        concurrent: requests at once, of one server.
    """

    name: str
    sha256: str
    expires_at: float
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    concurrent: int = 0

    def expired(self, now: float) -> bool:
        """Return whether it is no longer accepted."""
        return self.expires_at <= now


class KeyStore:
    """The file of named keys; several processes may use it at once.

    Args:
        folder: None: ``api_keys`` next to the generated key.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or key_file().parent / "api_keys"
        self.file = self.folder / FILE

    def read(self) -> list[NamedKey]:
        """Return all keys, expired ones too; none without a file.

        Raises:
            UserError: if the file is not valid, or other users can read or replace it.
        """
        try:
            _check_private(os.stat(self.folder), self.folder, "700")
            with open(self.file, "rb") as opened:
                _check_private(os.fstat(opened.fileno()), self.file, "600")
                data = opened.read(MOST_BYTES + 1)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise UserError(f"cannot read the API keys in {self.file}: {error.strerror}") from None
        try:
            keys = msgspec.json.decode(data, type=list[NamedKey])
            for key in keys:
                check_token(key.name, "name")
        except (msgspec.MsgspecError, RecursionError, ConfigError):
            raise UserError(
                f"{self.file} is not a file of API keys that `rlearner api-key` wrote"
            ) from None
        return keys

    def create(
        self,
        name: str,
        *,
        expires_s: float,
        requests_per_minute: int,
        tokens_per_minute: int,
        concurrent: int,
    ) -> tuple[str, NamedKey]:
        """Make a key that servers accept at once; return it, which is not stored, and its entry.

        Raises:
            UserError: if the name is taken or not allowed, or the file cannot be used.
        """
        if check_token(name, "NAME") == DEFAULT:
            raise ConfigError(
                "NAME",
                name,
                "any other; it is the name of RL_API_KEY and of the generated key in logs",
            )
        secret = f"rl-{secrets.token_urlsafe(32)}"
        expires_at = time.time() + expires_s
        key = NamedKey(
            name,
            _hash_key(secret),
            expires_at,
            requests_per_minute=requests_per_minute,
            tokens_per_minute=tokens_per_minute,
            concurrent=concurrent,
        )
        with self._locked():
            keys = self.read()
            if any(key.name == name for key in keys):
                raise UserError(
                    f"there is an API key {name} already; `rlearner api-key revoke {name}` ends it"
                )
            if len(keys) >= MOST_KEYS:
                raise UserError(
                    f"there are {MOST_KEYS} API keys already; revoke those that are no longer used"
                )
            self._write([*keys, key])
        return secret, key

    def revoke(self, name: str) -> None:
        """Refuse a key from now on.

        Raises:
            UserError: if there is no such key, or the file cannot be used.
        """
        with self._locked():
            keys = self.read()
            remaining = [key for key in keys if key.name != name]
            if len(remaining) == len(keys):
                raise UserError(
                    f"there is no API key {name!r}; there is "
                    f"{', '.join(k.name for k in keys) or 'none'}"
                )
            self._write(remaining)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            opened = lock(
                self.folder / "lock",
                f"another process has locked {self.folder}",
                wait_s=LOCK_WITHIN_S,
            )
        except OSError as error:
            raise UserError(f"cannot use {self.folder}: {error.strerror}") from None
        with opened:
            yield

    def _write(self, keys: list[NamedKey]) -> None:
        """Replace the file, whole or not at all."""
        try:
            private_write(
                self.file,
                msgspec.json.format(msgspec.json.encode([asdict(key) for key in keys])) + b"\n",
            )
        except OSError as error:
            raise UserError(f"cannot write {self.file}: {error.strerror}") from None


class LiveKeys:
    """The keys as a server accepts them: the file is read again when it has changed.

    A file that is no longer valid or private admits no key, with an error in the log.
    """

    def __init__(self, store: KeyStore) -> None:
        self._store = store
        self._stamp: tuple[int, ...] | None = None
        self.keys: list[NamedKey] = []
        # How often the keys were read.
        self.changes = 0

    def find(self, token: str) -> NamedKey | None:
        """Return the key with this secret, expired or not, or None; compared in constant time."""
        self._refresh()
        digest = _hash_key(token)
        match = None
        # All are compared, so that the time reveals nothing.
        for key in self.keys:
            if hmac.compare_digest(digest, key.sha256):
                match = key
        return match

    def _refresh(self) -> None:
        stamp = _file_stamp(self._store.folder) + _file_stamp(self._store.file)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        self.changes = self.changes + 1
        try:
            self.keys = self._store.read()
        except UserError as error:
            self.keys = []
            log.error("named API keys are refused: %s", error)


def _file_stamp(path: Path) -> tuple[int, ...]:
    """Return what changes when a file is replaced, or its mode changes."""
    try:
        status = os.stat(path)
    except OSError:
        return (0,)
    return status.st_ino, status.st_ctime_ns, status.st_mode, status.st_uid


def _check_private(status: os.stat_result, path: Path, mode: str) -> None:
    if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise UserError(f"{path} must belong to you alone; run chmod {mode} {path}")


def _hash_key(secret: str) -> str:
    return hashlib.sha256(secret.encode(errors="surrogateescape")).hexdigest()
