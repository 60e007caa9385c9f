"""``rlearner console``: opens the port, makes the login, and serves until it is asked to stop."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import re
import secrets
import socket
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final

from broker.errors import ConfigError, NotInstalled, UserError
from broker.nats.addresses import INSECURE
from broker.runtime.process import Stop
from broker.system.connections import is_loopback
from broker.system.private_files import private_folder, private_write
from learner.run_folder import find_run
from rlearner.console.access import LOOPBACK_NAMES, ConsoleAccess
from rlearner.console.gate import ConsoleGate

log = logging.getLogger(__name__)

SAFER: Final = "add --tls-cert and --tls-key, or --insecure on a network that you trust"
HOST_NAME: Final = re.compile(r"[\w-]{1,63}(\.[\w-]{1,63})*", re.ASCII)
MIN_PASSWORD: Final = 12  # characters
GRACE_S: Final = 2  # for pages to disconnect
COMPRESSED_FROM: Final = 1000  # bytes
COMPRESSION: Final = 4


async def serve_console(options: argparse.Namespace, stop: Stop) -> int:
    """Serve the console until a stop is requested; return the exit code.

    Raises:
        UserError: if there is no such run, the port is in use, or the options do not go together.
    """
    root, start = _find_place(options)
    for name in options.host_name or []:
        check_host_name(name)
    password = read_password(Path(options.password_file)) if options.password_file else None
    tls = _tls_context(options)
    try:
        from rlearner.console.app import make_app
        from rlearner.console.state import ConsoleState
    except ImportError as error:
        raise NotInstalled(
            f"the console needs {error.name}: pip install 'rlearner[console]'"
        ) from None
    listener = open_port(options.bind, options.port)
    with contextlib.closing(listener):
        port = listener.getsockname()[1]
        scheme = "https" if tls else "http"
        names, host = _host_names(options, has_tls=bool(tls))
        address = f"{scheme}://{_bracket_host(host)}:{port}"
        state = ConsoleState(root, options.broker, options.actions)
        if start:
            state.run(start, keep=True)
        target = f"/run/{start}" if start else "/"
        with _login_links(address, target, port) as on_token:
            access = ConsoleAccess(password, on_token)
            gate = ConsoleGate(
                make_app(state), access, names, f"rlearner_console_{port}", secure=bool(tls)
            )
            print(f"console of {root} at {address}, {_describe_rights(options)}", flush=True)
            access.new_link()
            tidy = asyncio.create_task(state.tidy())
            try:
                await _serve_console(gate, listener, tls, stop)
            finally:
                tidy.cancel()
                await asyncio.gather(tidy, return_exceptions=True)
                await state.close()
    return 0


def _describe_rights(options: argparse.Namespace) -> str:
    if options.actions:
        return "with operator's actions"
    return "read-only; --actions allows to pause, stop and the like"


def _find_place(options: argparse.Namespace) -> tuple[Path, str]:
    """Return the folder of the runs, and the name of the run to begin with.

    Raises:
        UserError: if there is no such run or folder.
    """
    if options.run_name:
        place = find_run(options.run_name, options.dir)
        return place.folder.parent, place.folder.name
    root = Path(options.dir)
    if not root.is_dir():
        raise UserError(f"{root}: no such folder; name the folder that holds the runs with --dir")
    return root.absolute(), ""


def read_password(path: Path) -> str:
    """Return the password in a file.

    Raises:
        ConfigError: if others can read it, it cannot be read, or the password is short.
    """
    try:
        with path.open("rb") as file:
            if (mode := stat.S_IMODE(os.fstat(file.fileno()).st_mode)) & 0o077:
                raise ConfigError(
                    "--password-file",
                    str(path),
                    f"mode {mode:04o} lets others read it; chmod 600 it",
                )
            password = file.read(4096).decode("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        problem = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError("--password-file", str(path), f"it cannot be read: {problem}") from None
    if len(password) < MIN_PASSWORD:
        raise ConfigError(
            "--password-file", str(path), f"a password of at least {MIN_PASSWORD} characters"
        )
    return password


def check_host_name(name: str) -> None:
    """Check a name under which browsers reach the console: it is in the link, and compared with
    what they ask for.

    Raises:
        ConfigError: if it is none.
    """
    try:
        is_address = bool(ip_address(name))
    except ValueError:
        is_address = False
    if not is_address and HOST_NAME.fullmatch(name) is None:
        raise ConfigError("--host-name", name, "a host name or an address, without scheme and port")


def _tls_context(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options of the server for TLS, empty without.

    Raises:
        ConfigError: if the console would be reachable by others without TLS.
    """
    from rlearner_text.openai.certificates import server_tls

    if bool(options.tls_cert) != bool(options.tls_key):
        raise ConfigError("--tls-cert", options.tls_cert, "with --tls-key, its private key")
    if options.tls_cert:
        server_tls(
            options.tls_cert, options.tls_key, cert_name="--tls-cert", key_name="--tls-key"
        )  # says what is wrong
        return {"ssl_certfile": options.tls_cert, "ssl_keyfile": options.tls_key}
    if not is_loopback(options.bind) and not os.environ.get(INSECURE):
        allowed = "an address of loopback without TLS, because others could read logins and runs; "
        raise ConfigError("--bind", options.bind, f"{allowed}{SAFER}")
    return {}


def _is_any(bind: str) -> bool:
    return bind in ("0.0.0.0", "::", "")


def _host_names(options: argparse.Namespace, *, has_tls: bool) -> tuple[set[str], str]:
    """Return the names under which the console answers, and the one in its address.

    A browser sends a cookie to all ports of a host name. On loopback these may be programs of other
    users, so the console has a name there that nobody can guess; browsers resolve every name below
    localhost to loopback.
    """
    hosts = [name.lower() for name in options.host_name or []]
    if is_loopback(options.bind) and not has_tls:
        names = hosts or [f"{secrets.token_hex(8)}.localhost"]
        return set(names), names[0]
    own = set() if _is_any(options.bind) else {options.bind.lower()}
    host = socket.getfqdn() if _is_any(options.bind) else options.bind
    return {*LOOPBACK_NAMES, *hosts, *own}, hosts[0] if hosts else host


def _bracket_host(name: str) -> str:
    return f"[{name}]" if ":" in name else name


def open_port(bind: str, port: int) -> socket.socket:
    """Return a listening socket.

    Raises:
        ConfigError: if the port is in use, or the address is none of this host.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in bind else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((bind, port))
        listener.listen(256)
    except (OSError, UnicodeError) as error:
        listener.close()
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        if isinstance(error, socket.gaierror):
            raise ConfigError("--bind", bind, f"an address of this host ({reason})") from None
        raise ConfigError(
            "--port", port, f"not available on {bind} ({reason}); choose another, or 0 for any"
        ) from None
    return listener


@contextmanager
def _login_links(address: str, target: str, port: int) -> Iterator[Any]:
    """Yield what passes a new link to the operator: terminal or private file, never a log."""
    if sys.stdout.isatty():

        def say(token: str) -> None:
            print(f"log in (works once): {address}/login?token={token}&next={target}", flush=True)

        yield say
        return
    folder = private_folder(
        Path(os.environ.get("XDG_RUNTIME_DIR") or Path.home() / ".cache") / "rlearner"
    )
    file = folder / f"console-{port}.url"

    def write(token: str) -> None:
        private_write(file, f"{address}/login?token={token}&next={target}\n".encode())

    print(f"the link to log in, which works once, is in {file}", flush=True)
    try:
        yield write
    finally:
        file.unlink(missing_ok=True)


async def _serve_console(
    gate: ConsoleGate, listener: socket.socket, tls: dict[str, Any], stop: Stop
) -> None:
    import uvicorn
    from starlette.middleware.gzip import GZipMiddleware

    class Server(uvicorn.Server):
        """Server without uvicorn's own handling of signals and its polling for them."""

        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

        async def main_loop(self) -> None:
            await stop.asked.wait()

    compressed = GZipMiddleware(gate, minimum_size=COMPRESSED_FROM, compresslevel=COMPRESSION)
    config = uvicorn.Config(
        compressed,
        log_config=None,
        access_log=False,
        ws="websockets-sansio",
        lifespan="on",
        server_header=False,
        date_header=False,
        ws_per_message_deflate=False,
        timeout_graceful_shutdown=GRACE_S,
        proxy_headers=False,
        **tls,
    )
    await Server(config).serve(sockets=[listener])
