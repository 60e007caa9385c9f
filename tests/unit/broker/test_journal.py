"""What a process whose stderr is the journal's stream sends, to a real datagram socket."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import logging, sys
from broker.errors import UserError
from broker.runtime.process import main
from broker.system import journal, logs
journal.SOCKET = sys.argv.pop()
logs.configure()
logs.identify(run="lake", role="envhub", process_id="h1")
log = logging.getLogger("some.module")
log.info("a line with api_key=abcdefgh12345", extra={"step": 3})
try:
    1 / 0
except ZeroDivisionError:
    log.exception("it failed")
log.warning("x" * 4_000_000)
logs.say_error("port 4222 is taken")
"""


def entry(data: bytes) -> dict[str, str]:
    """Return the fields of an entry of the journal's native protocol."""
    fields = {}
    while data:
        line, _, data = data.partition(b"\n")
        name, is_short, value = line.partition(b"=")
        if not is_short:
            size = int.from_bytes(data[:8], "little")
            value, data = data[8 : 8 + size], data[8 + size + 1 :]
        fields[name.decode()] = value.decode()
    return fields


def run(
    tmp_path: Path, stream: str | None, *environ: tuple[str, str]
) -> tuple[list[dict[str, str]], str]:
    """Return the entries that the journal got, and stderr; ``stream``: JOURNAL_STREAM, by default
    stderr's own.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        server.bind(str(tmp_path / "journal"))
        server.setblocking(False)
        behind = tmp_path / "stderr"
        with behind.open("wb") as errors:
            there = os.fstat(errors.fileno())
            told = {
                **os.environ,
                "JOURNAL_STREAM": stream or f"{there.st_dev}:{there.st_ino}",
                **dict(environ),
            }
            command = [sys.executable, "-c", SCRIPT, str(tmp_path / "journal")]
            subprocess.run(command, env=told, stderr=errors, check=True, timeout=60)
        entries = []
        try:
            while True:
                entries.append(entry(server.recv(1 << 20)))
        except BlockingIOError:
            return entries, behind.read_text()


def test_records_become_entries_with_fields(tmp_path: Path) -> None:
    (info, failure), err = run(tmp_path, None)
    assert info["MESSAGE"] == "a line with api_key=*** step=3"  # no time, level or names twice
    names = {
        name: info[name]
        for name in ("PRIORITY", "RL_RUN", "RL_ROLE", "RL_ID", "LOGGER", "SYSLOG_IDENTIFIER")
    }
    expected = {
        "PRIORITY": "6",
        "RL_RUN": "lake",
        "RL_ROLE": "envhub",
        "RL_ID": "h1",
        "LOGGER": "some.module",
    }
    assert names == {**expected, "SYSLOG_IDENTIFIER": "-c"}
    lines = failure["MESSAGE"].splitlines()
    assert (failure["PRIORITY"], lines[:2]) == (
        "3",
        ["it failed", "Traceback (most recent call last):"],
    )
    assert lines[-1] == "ZeroDivisionError: division by zero"
    long, error = err.splitlines()
    # beyond a datagram: by the stream
    assert long.endswith(" WARNING lake envhub h1 " + "x" * 4_000_000)
    assert error == "<3>error: port 4222 is taken"  # a process that ends: the stream knows its unit


def test_json_is_the_message_if_asked_for(tmp_path: Path) -> None:
    (info, _), err = run(tmp_path, None, ("RL_LOG_FORMAT", "json"))
    assert '"level": "INFO", "run": "lake"' in info["MESSAGE"]
    assert info["RL_RUN"] == "lake"
    assert '<3>{"time"' in err


def test_another_stderr_gets_plain_lines(tmp_path: Path) -> None:
    entries, err = run(tmp_path, "1:2")
    assert entries == []
    assert " INFO lake envhub h1 a line with api_key=*** step=3\n" in err
    assert err.endswith("\nerror: port 4222 is taken\n")
