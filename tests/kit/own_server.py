"""A nats-server of a user, with a configuration of the user's own, which the project did not start."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sysconfig
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from bench.support.fleet import free_port

BINARY = os.environ.get(
    "RL_TEST_NATS_SERVER", str(Path(sysconfig.get_path("scripts")) / "nats-server")
)


@contextlib.contextmanager
def own_server(
    folder: Path, *, include: str = "", more: str = "", env: Mapping[str, str] | None = None
) -> Iterator[str]:
    """Yield the address of a nats-server that includes one file and has some more lines of
    configuration.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "included.conf").write_text(include)
    port = free_port()
    lines = [
        f"listen: 127.0.0.1:{port}",
        "max_payload: 9MB",
        f"jetstream {{ store_dir: {folder}/js }}",
        "include included.conf",
        more,
    ]
    (folder / "server.conf").write_text("\n".join(lines) + "\n")
    with (folder / "server.log").open("wb") as log:
        command = [BINARY, "-c", str(folder / "server.conf")]
        child = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **(env or {})})
    try:
        (folder / "pid").write_text(str(child.pid))
        _wait_until_open(child, port, folder / "server.log")
        yield f"nats://127.0.0.1:{port}"
    finally:
        child.terminate()
        child.wait(timeout=20)


def reload(folder: Path, include: str) -> None:
    """Replace the file that the server in a folder includes, and wait until the server has read it."""
    (folder / "included.conf").write_text(include)
    log, deadline = folder / "server.log", time.monotonic() + 20
    before = log.read_text().count("Reloaded server configuration")
    os.kill(int((folder / "pid").read_text()), signal.SIGHUP)
    while (
        log.read_text().count("Reloaded server configuration") == before
        and time.monotonic() < deadline
    ):
        time.sleep(0.02)


def _wait_until_open(child: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + 20
    while child.poll() is None and time.monotonic() < deadline:
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", port), timeout=1) as open_,
        ):
            if open_.recv(16):
                return
        time.sleep(0.02)
    raise AssertionError(log.read_text())
