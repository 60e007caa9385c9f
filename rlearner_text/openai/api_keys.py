"""Reads the API key from RL_API_KEY or a private file of the user; it is never logged."""

from __future__ import annotations

import hmac
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path
from typing import Final

from broker.errors import UserError

VARIABLE: Final = "RL_API_KEY"
LEAST_CHARACTERS: Final = 16


def key_file() -> Path:
    """Return the path of a generated key, ``rlearner/api_key`` in the user's configuration."""
    base = os.environ.get("XDG_CONFIG_HOME", "")
    return (
        (Path(base) if base.startswith("/") else Path.home() / ".config") / "rlearner" / "api_key"
    )


def find_key() -> tuple[str, str]:
    """Return the key that clients must send, and where it is; creates the file if necessary.

    All servers of a user on a machine share one file, so that clients need not be configured again.

    Raises:
        UserError: if the key is too short or not printable, others can read the file, or it cannot
            be written.
    """
    if key := os.environ.get(VARIABLE, ""):
        return _check_key(key, VARIABLE), VARIABLE
    path = key_file()
    try:
        if not path.exists():
            _create_key_file(path)
        mode = path.stat().st_mode
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            problem = f"may be read by others (mode {stat.S_IMODE(mode):o})"
            raise UserError(f"{path} {problem}; make it private with chmod 600")
        return _check_key(path.read_text(encoding="ascii").strip(), str(path)), str(path)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"no API key: {path}: {error}; set {VARIABLE}") from None


def matches(header: str | None, key: str) -> bool:
    """Return whether an Authorization header has the key; equal lengths take constant time."""
    token = bearer(header)
    return token is not None and hmac.compare_digest(
        token.encode(errors="surrogateescape"), key.encode()
    )


def bearer(header: str | None) -> str | None:
    """Return the key in an Authorization header, None without one."""
    scheme, _, token = (header or "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else None


def _create_key_file(path: Path) -> None:
    """Create the key file atomically; if another process has just created one, keep that."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f".api_key-{secrets.token_hex(4)}")
    handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(handle, "w", encoding="ascii") as file:
            file.write(f"rl-{secrets.token_urlsafe(32)}\n")
        with suppress(FileExistsError):
            os.link(draft, path)
    finally:
        draft.unlink()


def _check_key(key: str, place: str) -> str:
    if len(key) < LEAST_CHARACTERS or not key.isascii() or not key.isprintable() or " " in key:
        allowed = f"at least {LEAST_CHARACTERS} printable ASCII characters without spaces"
        raise UserError(f"the API key in {place} is not allowed; {allowed}")
    return key
