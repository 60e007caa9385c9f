"""The processes of one run on several hosts: broker and learner on the first, which the others join
with tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Final

from bench.support.fleet import MODULES, RunFleet, RunProcess
from bench.support.hosts.network_namespaces import HostNetwork, entered, host_network
from broker.identity import tokens
from broker.identity.login import keys_of

HOURS: Final = 3600.0
# what a process says that ends with 2 because its token was revoked
REFUSED: Final = "it was revoked or has expired"
ON_A_HOST: Final = 'hostname "$1"; shift; until [ "$1" = -- ]; do mount -t tmpfs tmpfs "$1"; shift; done; shift; exec "$@"'


@dataclass
class HostFleet(RunFleet):
    """A fleet whose first host has the broker and the learner; the caller is on that host, see
    ``hosts_of_a_fleet``.

    The other hosts see none of ``hidden`` (each is an empty folder there), have names and a state
    of their own, and know of the run only what their tokens say.

    Attributes:
        layout: by role, the hosts of its processes, in turn.
        hidden: folders of the first host.
        hosts: by name, the host of each process.
    """

    network: HostNetwork = field(default_factory=lambda: HostNetwork(0))
    layout: Mapping[str, Sequence[int]] = field(default_factory=dict)
    hidden: list[Path] = field(default_factory=list)
    hosts: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        for folder in self.hidden:
            folder.mkdir(exist_ok=True)
        self._turns = {role: cycle(hosts) for role, hosts in self.layout.items()}

    def add(self, role: str, name: str, *arguments: str) -> RunProcess:
        """Start a process on the host whose turn it is; all but a learner have a token of their own
        and trust code.
        """
        if role == "learner":
            return super().add(role, name, *arguments)
        host = self.hosts[name] = next(self._turns[role])
        own = self.folder.parent / f"host-{host}"
        own.mkdir(exist_ok=True)
        tokens.write_token(
            tokens.make_join_token(
                keys_of(self.url), self.url, role, self.run, name=name, expires_s=HOURS
            ),
            own / f"{name}.token",
        )
        hide = [str(folder) for folder in (self.folder, *self.hidden)]
        command = [
            *self.network.inside(host),
            "unshare",
            "--mount",
            "--uts",
            "sh",
            "-c",
            ON_A_HOST,
            "sh",
        ]
        command += [
            f"host-{host}",
            *hide,
            "--",
            sys.executable,
            "-m",
            MODULES[role],
            *arguments,
            "--id",
            name,
        ]
        command += ["--join", str(own / f"{name}.token"), "--trust-run-code"]
        state = {
            f"XDG_{kind}": str(own / kind.lower())
            for kind in ("STATE_HOME", "CACHE_HOME", "RUNTIME_DIR")
        }
        (own / "runtime_dir").mkdir(mode=0o700, exist_ok=True)
        return self.start(RunProcess(name, role, command, self.folder / f"{name}.log", env=state))

    def revoke(self, child: RunProcess) -> None:
        """Revoke the token of a process, which may now end because of that."""
        child.may_end_with = REFUSED
        keys = keys_of(self.url)
        for user in [user for user in keys.users() if user.name == child.name]:
            keys.revoke(user)


@contextmanager
def hosts_of_a_fleet(num_hosts: int) -> Iterator[HostNetwork]:
    """Create hosts, and be on the first one: this thread, and what it starts from now on."""
    with host_network(num_hosts) as network, entered(network.hosts[0]):
        yield network
