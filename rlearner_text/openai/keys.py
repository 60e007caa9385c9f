"""The API key: from RL_API_KEY, else one of this user's own in a file that nobody else may read. It is never logged."""

from __future__ import annotations

import hmac
import os
import secrets
import stat
from pathlib import Path
from typing import Final

from broker.errors import UserError

VARIABLE: Final = "RL_API_KEY"
LEAST_CHARACTERS: Final = 16


def key_file() -> Path:
    """Where a generated key is kept: ``$XDG_CONFIG_HOME/rlearner/api_key``, by default in ``~/.config``."""
    base = os.environ.get("XDG_CONFIG_HOME", "")
    return (Path(base) if base.startswith("/") else Path.home() / ".config") / "rlearner" / "api_key"


def find_key() -> tuple[str, str]:
    """The key that clients must send, and where it stands, for people.

    One file serves every server of a user on a machine, now and later, so that agents need not be told again.

    Raises:
        UserError: it is too short or not printable, others may read the file, or no file can be written.
    """
    if given := os.environ.get(VARIABLE, ""):
        return _checked(given, VARIABLE), VARIABLE
    path = key_file()
    try:
        if not path.exists():
            _create(path)
        mode = path.stat().st_mode
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise UserError(f"{path} may be read by others (mode {stat.S_IMODE(mode):o}); make it yours alone with chmod 600")
        return _checked(path.read_text(encoding="ascii").strip(), str(path)), str(path)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"no API key: {path}: {error}; set {VARIABLE}") from None


def matches(header: str | None, key: str) -> bool:
    """Whether an Authorization header holds the key; takes the same time for every wrong one of a length."""
    scheme, _, given = (header or "").partition(" ")
    return scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(errors="surrogateescape"), key.encode())


def _create(path: Path) -> None:
    """Whole or not at all, and by one process: another that makes it at the same moment keeps its own."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f".api_key-{secrets.token_hex(4)}")
    handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(handle, "w", encoding="ascii") as file:
            file.write(f"rl-{secrets.token_urlsafe(32)}\n")
        try:
            os.link(draft, path)
        except FileExistsError:
            return
    finally:
        draft.unlink()


def _checked(key: str, where: str) -> str:
    if len(key) < LEAST_CHARACTERS or not key.isascii() or not key.isprintable() or " " in key:
        raise UserError(f"the API key in {where} is not allowed; at least {LEAST_CHARACTERS} printable ASCII characters without spaces")
    return key
