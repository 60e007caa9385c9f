"""Who may use the console: single-use links, a password, sessions, host names. Pure.

Loopback is not a trust boundary: every user of the machine, and every page in the operator's
browser, reaches it. Reading needs a login, too, because prompts, responses and settings are as
private as the run's folder, which is 0700.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlsplit

SESSION_S: Final = 12 * 3600.0  # without a request
MAX_SESSIONS: Final = 64
FREE_FAILURES: Final = 5  # wrong passwords before one has to wait
LONGEST_WAIT_S: Final = 60.0
LOOPBACK_NAMES: Final = ("127.0.0.1", "localhost", "::1")


@dataclass
class PasswordLimit:
    """Wait after wrong passwords, which doubles with each: 1, 2, 4 … 60 s.

    It counts all of them together, because on loopback everybody has the same address. The link
    needs no limit, and still works during a wait, so that nobody can lock the operator out.
    """

    failures: int = 0
    until: float = 0.0

    def wait_s(self, now: float) -> float:
        """Return the seconds until the next password is looked at."""
        return max(0.0, self.until - now)

    def failed(self, now: float) -> None:
        """Count a wrong password."""
        self.failures += 1
        if self.failures >= FREE_FAILURES:
            self.until = now + min(LONGEST_WAIT_S, 2.0 ** min(self.failures - FREE_FAILURES, 6))

    def passed(self) -> None:
        """Forget the wrong ones."""
        self.failures = 0
        self.until = 0.0


@dataclass
class ConsoleAccess:
    """Logins and sessions of one console, in memory: they end with it.

    Args:
        password: None allows only links.
        on_token: receives each new link token; a link works once.
    """

    password: str | None = None
    on_token: Callable[[str], None] = lambda token: None
    limit: PasswordLimit = field(default_factory=PasswordLimit)
    _token: str = ""
    # digest of the cookie -> time of the last request
    _sessions: dict[bytes, float] = field(default_factory=dict)

    def new_link(self) -> str:
        """Replace the link's token, and return the new one."""
        self._token = secrets.token_urlsafe(32)
        self.on_token(self._token)
        return self._token

    def use_link(self, token: str, now: float) -> str | None:
        """Return the cookie of a new session, None if the token is not the present one."""
        if not self._token or not _is_same_secret(token, self._token):
            return None
        self.new_link()
        return self._begin(now)

    def use_password(self, password: str, now: float) -> str | float:
        """Return the cookie of a new session, or the seconds until the next try; 0: at once."""
        if (wait_s := self.limit.wait_s(now)) > 0:
            return wait_s
        if self.password is None or not _is_same_secret(password, self.password):
            self.limit.failed(now)
            return self.limit.wait_s(now)
        self.limit.passed()
        return self._begin(now)

    def is_valid(self, cookie: str, now: float) -> bool:
        """Return whether a session has this cookie, and note the request."""
        key = _digest_token(cookie)
        last = self._sessions.get(key)
        if last is None or now - last > SESSION_S:
            self._sessions.pop(key, None)
            return False
        self._sessions[key] = now
        return True

    def end(self, cookie: str) -> None:
        self._sessions.pop(_digest_token(cookie), None)

    def _begin(self, now: float) -> str:
        while len(self._sessions) >= MAX_SESSIONS:
            del self._sessions[min(self._sessions, key=self._sessions.__getitem__)]
        cookie = secrets.token_urlsafe(32)
        self._sessions[_digest_token(cookie)] = now
        return cookie


def session_name(cookie: str) -> str:
    """Return a name for a session in logs, from which its cookie cannot be made."""
    return _digest_token(cookie).hex()[:8]


def is_known_host(host: str, names: Iterable[str]) -> bool:
    """Return whether a Host header is one of the console's names, with any port.

    A page of another site can have its name resolved to this address (DNS rebinding), but not
    change this header.
    """
    try:
        name = urlsplit(f"//{host}").hostname
    except ValueError:
        return False
    return name is not None and name.lower() in names


def is_same_origin(origin: str, scheme: str, host: str) -> bool:
    """Return whether an Origin header is that of a page of this console."""
    return hmac.compare_digest(origin.lower().encode(), f"{scheme}://{host}".lower().encode())


def _digest_token(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def _is_same_secret(first: str, second: str) -> bool:
    """Compare in a time that reveals nothing, not even the length."""
    return hmac.compare_digest(_digest_token(first), _digest_token(second))
