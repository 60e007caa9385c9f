"""Lets only logged-in browsers through, and sets headers that keep other sites' code away."""

from __future__ import annotations

import html
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable, MutableMapping
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs, quote

from rlearner.console.access import ConsoleAccess, is_known_host, is_same_origin, session_name

log = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

WEB: Final = Path(__file__).parent / "web"
# the login page's
OPEN_FILES: Final = {"/assets/console.css": "text/css", "/assets/console.js": "text/javascript"}
MAX_FORM_BYTES: Final = 4096
MAX_ADDRESS: Final = 8192  # characters of path and query
SCRIPT: Final = re.compile(rb"<script(?=[\s>])")
STRICT: Final = "default-src 'none'; base-uri 'none'; frame-ancestors 'none'; form-action 'self'"
HEADERS: Final = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
}


def policy(nonce: str = "") -> str:
    """Return the Content-Security-Policy: this server's files, and the page's own scripts.

    ``unsafe-eval`` is for Vue's templates and NiceGUI's messages, both ours; markup from a run
    cannot reach it, as inline handlers and scripts without the nonce do not run.
    """
    inline = f" 'nonce-{nonce}'" if nonce else ""
    return (
        f"{STRICT}; script-src 'self'{inline} 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
        "img-src 'self' data:; "
        "font-src 'self'; connect-src 'self'; manifest-src 'self'"
    )


class ConsoleGate:
    """ASGI application in front of the console's.

    Args:
        app: sees only requests of a session, with the session's name in
            ``scope["state"]["session"]``.
        names: of the host, as browsers may ask for it.
        cookie: name of the cookie; another port of the same host needs another one.
        secure: whether it is served over TLS.
    """

    def __init__(
        self, app: App, access: ConsoleAccess, names: set[str], cookie: str, *, secure: bool
    ) -> None:
        self.app = app
        self._access = access
        self._names = names
        self._cookie = cookie
        self._secure = secure

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request or connection."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if (
            scope["type"] == "http"
            and len(scope["path"]) + len(scope["query_string"]) > MAX_ADDRESS
        ):
            await respond(
                send, 414, f"the address is longer than {MAX_ADDRESS} characters\n", "text/plain"
            )
            return
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        refused = self._refused(scope, headers)
        if scope["type"] == "websocket":
            await self._websocket(scope, receive, send, headers, refused)
        elif refused:
            await respond(send, 403, f"{refused}\n", "text/plain")
        else:
            await self._http(scope, receive, send, headers)

    def _refused(self, scope: Scope, headers: dict[str, str]) -> str:
        """Return why a request is not from a page of this console, empty if it may be."""
        host = headers.get("host", "")
        if not is_known_host(host, self._names):
            return (
                "this console answers only under the name in its link; rlearner console "
                "--host-name adds another"
            )
        if scope["type"] == "websocket" or scope["method"] not in ("GET", "HEAD"):
            scheme = "https" if self._secure else "http"
            if not is_same_origin(headers.get("origin", ""), scheme, host):
                return "only pages of this console may do this"
        return ""

    # -- a page's connection

    async def _websocket(
        self, scope: Scope, receive: Receive, send: Send, headers: dict[str, str], refused: str
    ) -> None:
        cookie = self._cookie_of(headers)
        if refused or not self._access.is_valid(cookie, time.monotonic()):
            await receive()  # the handshake
            await send({"type": "websocket.close", "code": 1008})
            return

        async def while_valid() -> Message:
            message = await receive()
            if message["type"] == "websocket.receive" and not self._access.is_valid(
                cookie, time.monotonic()
            ):
                return {"type": "websocket.disconnect", "code": 1008}
            return message

        await self.app(self._known(scope, cookie), while_valid, send)

    # -- requests

    async def _http(
        self, scope: Scope, receive: Receive, send: Send, headers: dict[str, str]
    ) -> None:
        path = scope["path"]
        cookie = self._cookie_of(headers)
        if path in OPEN_FILES:
            await respond(
                send, 200, (WEB / Path(path).name).read_bytes(), OPEN_FILES[path], cache="no-cache"
            )
        elif path == "/login":
            await self._login(scope, receive, send)
        elif not self._access.is_valid(cookie, time.monotonic()):
            await self._to_login(scope, send, headers)
        elif path == "/logout" and scope["method"] == "POST":
            self._access.end(cookie)
            await redirect(send, "/login", [self._set_cookie("", 0)])
        else:
            await self.app(self._known(scope, cookie), receive, self._marked(send))

    def _known(self, scope: Scope, cookie: str) -> Scope:
        return {**scope, "state": {**scope.get("state", {}), "session": session_name(cookie)}}

    async def _to_login(self, scope: Scope, send: Send, headers: dict[str, str]) -> None:
        if scope["method"] == "GET" and "text/html" in headers.get("accept", ""):
            query = scope["query_string"].decode("latin-1")
            await redirect(
                send,
                f"/login?next={quote(scope['path'] + (f'?{query}' if query else ''), safe='')}",
            )
        else:
            await respond(send, 401, "log in first\n", "text/plain")

    async def _login(self, scope: Scope, receive: Receive, send: Send) -> None:
        query = parse_qs(scope["query_string"].decode("latin-1"))
        target = _own_path(query.get("next", ["/"])[0])
        now = time.monotonic()
        if scope["method"] == "POST":
            form = parse_qs((await body(receive, MAX_FORM_BYTES)).decode("utf-8", "replace"))
            secret = form.get("secret", [""])[0]
            target = _own_path(form.get("next", ["/"])[0])
            expires_at = self._access.use_link(secret, now) or self._access.use_password(
                secret, now
            )
        elif "token" in query:
            expires_at = self._access.use_link(query["token"][0], now) or 0.0
        else:
            await respond(send, 200, self._page(target, ""), "text/html")
            return
        client_host = (scope.get("client") or ("?",))[0]
        if isinstance(expires_at, str):
            log.info("login from %s, session %s", client_host, session_name(expires_at))
            await redirect(send, target, [self._set_cookie(expires_at)])
            return
        log.warning("refused login from %s", client_host)
        wait = f"; wait {expires_at:.0f} s before the next try" if expires_at else ""
        method = (
            "This link is wrong or was used already"
            if scope["method"] == "GET"
            else "Wrong password or token"
        )
        await respond(
            send, 429 if expires_at else 403, self._page(target, f"{method}{wait}."), "text/html"
        )

    def _page(self, target: str, problem: str) -> bytes:
        secret_kind = "password" if self._access.password is not None else "token"
        text = (
            "The console prints a link on its terminal; it works once, and the next one is "
            "printed when it was used. "
            + (
                "Or log in with the password of its file."
                if secret_kind == "password"
                else "Or paste the link's token here."
            )
        )
        notice = (
            f'<div class="banner bad" role="alert">{html.escape(problem)}</div>' if problem else ""
        )
        page = f"""<!doctype html><html lang="en"><head><meta charset="utf-8">
<title>Log in to rlearner</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="stylesheet" href="/assets/console.css">
<script src="/assets/console.js"></script></head>
<body><main class="main" style="max-width:430px;padding-top:12vh">
<h1>rlearner console</h1><p class="dim">{text}</p>{notice}
<form class="panel" method="post" action="/login">
<input type="hidden" name="next" value="{html.escape(target)}">
<div class="form" style="margin:0"><label class="wide">{secret_kind}
<input class="in" name="secret" type="password" autocomplete="current-password"
 required autofocus></label>
<button class="btn primary" type="submit">Log in</button></div></form></main></body></html>"""
        return page.encode()

    # -- cookies and headers

    def _cookie_of(self, headers: dict[str, str]) -> str:
        try:
            morsel = SimpleCookie(headers.get("cookie", "")).get(self._cookie)
        except CookieError:
            return ""
        return morsel.value if morsel is not None else ""

    def _set_cookie(self, value: str, max_age: int | None = None) -> tuple[str, str]:
        age = "" if max_age is None else f"; Max-Age={max_age}"
        secure = "; Secure" if self._secure else ""
        return (
            "set-cookie",
            f"{self._cookie}={value}; Path=/; HttpOnly; SameSite=Strict{age}{secure}",
        )

    def _marked(self, send: Send) -> Send:
        """Return a ``send`` that adds the headers, and the nonce to a page's own scripts."""
        nonce = secrets.token_urlsafe(16)
        start: Message = {}
        chunks: list[bytes] = []

        async def marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                kinds = dict(message["headers"])
                is_page = kinds.get(b"content-type", b"").startswith(b"text/html")
                added = {**HEADERS, "content-security-policy": policy(nonce if is_page else "")}
                headers = [
                    (n, v)
                    for n, v in message["headers"]
                    if not (is_page and n.lower() == b"content-length")
                ]
                message = {
                    **message,
                    "headers": headers + [(n.encode(), v.encode()) for n, v in added.items()],
                }
                if is_page:
                    start.update(message)
                    return
            elif start:
                chunks.append(message.get("body", b""))
                if message.get("more_body"):
                    return
                # what a run wrote is in the page only as JSON with < as &lt;, so these are the
                # page's own scripts
                page = SCRIPT.sub(f'<script nonce="{nonce}"'.encode(), b"".join(chunks))
                await send(
                    {
                        **start,
                        "headers": [
                            *start["headers"],
                            (b"content-length", str(len(page)).encode()),
                        ],
                    }
                )
                message = {"type": "http.response.body", "body": page}
            await send(message)

        return marked


def _own_path(target: str) -> str:
    """Return a path of this console, ``/`` for anything else, such as ``//other.site``."""
    is_own = (
        target.startswith("/") and not target.startswith(("//", "/\\")) and target.isprintable()
    )
    return target if is_own and "\\" not in target else "/"


async def body(receive: Receive, most: int) -> bytes:
    """Return a request's body, cut behind ``most`` bytes."""
    data = b""
    while len(data) <= most:
        message = await receive()
        data += message.get("body", b"")
        if not message.get("more_body"):
            break
    return data[:most]


async def respond(
    send: Send,
    status: int,
    content: bytes | str,
    kind: str,
    more: list[tuple[str, str]] | None = None,
    *,
    cache: str = "no-store",
) -> None:
    """Send a whole response of the gate itself."""
    data = content.encode() if isinstance(content, str) else content
    style = "; style-src 'self' 'unsafe-inline'; script-src 'self'"
    headers = {
        **HEADERS,
        "content-type": f"{kind}; charset=utf-8",
        "content-length": str(len(data)),
        "cache-control": cache,
        "content-security-policy": STRICT + style,
    }
    pairs = [(name.encode(), value.encode()) for name, value in [*headers.items(), *(more or [])]]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": data})


async def redirect(send: Send, target: str, more: list[tuple[str, str]] | None = None) -> None:
    """Send the browser to another page."""
    await respond(
        send,
        303,
        b"",
        "text/plain",
        [("location", quote(target, safe="/?=&%:,.-_~")), *(more or [])],
    )
