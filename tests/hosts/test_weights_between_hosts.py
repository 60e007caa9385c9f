"""The weight channel between network namespaces: servers of other hosts get the weights, and
nothing is on loopback.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from waits import LONG_S

from bench.support.hosts.network_namespaces import HostNetwork, host_network, why_not
from bench.support.hosts.slow_tunnel import slow_tunnel
from broker.server.private_server import find_binary

KIT: Final = Path(__file__).parents[1] / "kit"
BROKER_PORT: Final = 4222
pytestmark = pytest.mark.skipif(
    bool(why_not()), reason=why_not() or "there can be network namespaces"
)


class HostProcess:
    """A process on one of the hosts, and what it said as lines of JSON."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def hears(self, **fields: Any) -> dict[str, Any]:
        """The next line with these fields."""
        assert self.process.stdout is not None
        async with asyncio.timeout(LONG_S):
            while line := await self.process.stdout.readline():
                said: dict[str, Any] = json.loads(line)
                if said.items() >= fields.items():
                    return said
        raise AssertionError(f"ended without {fields}")

    async def ask(self, **request: Any) -> dict[str, Any]:
        """Send a line and return the answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request).encode() + b"\n")
        return await self.hears()


class Hosts:
    """Three hosts: broker and learner on the first, servers on the others."""

    def __init__(self, network: HostNetwork, url: str, run: str) -> None:
        self.network, self.url, self.run, self.processes = network, url, run, list[HostProcess]()

    async def start(self, host: int, script: str, name: str, **options: Any) -> HostProcess:
        paths = os.pathsep.join([str(KIT), str(KIT.parents[1])])
        process = await asyncio.create_subprocess_exec(
            *self.network.inside(host),
            sys.executable,
            str(KIT / script),
            self.url,
            self.run,
            name,
            json.dumps(options),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
        )
        made = HostProcess(process)
        self.processes.append(made)
        await made.hears(event="ready")
        return made


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[HostNetwork, str]]:
    """Hosts, and the broker's address on the first."""
    folder = tmp_path_factory.mktemp("broker")
    with host_network(3) as made, pytest.MonkeyPatch.context() as patch:
        patch.setenv("RL_INSECURE", "1")  # what is tested here is the weight channel
        settings = f'host: "{made.addresses[0]}"\nport: {BROKER_PORT}\nmax_payload: 9MB\n'
        (folder / "nats.conf").write_text(f'{settings}jetstream {{ store_dir: "{folder}" }}\n')
        command = [*made.inside(0), find_binary(), "-c", str(folder / "nats.conf")]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as server:
            yield made, f"nats://{made.addresses[0]}:{BROKER_PORT}"
            server.kill()


@pytest.fixture
async def hosts(network: tuple[HostNetwork, str], run_name: str) -> AsyncIterator[Hosts]:
    made = Hosts(*network, run_name)
    yield made
    for one in made.processes:
        if one.process.returncode is None:
            one.process.kill()
        await one.process.wait()


def listening(network: HostNetwork, host: int, process: HostProcess) -> set[str]:
    """Addresses at which a process listens for TCP connections."""
    shown = subprocess.run(
        [*network.inside(host), sys.executable, "-c", LISTENING, str(process.process.pid)],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(json.loads(shown.stdout))


LISTENING: Final = """
import json, psutil, sys
found = psutil.Process(int(sys.argv[1])).net_connections(kind="tcp")
print(json.dumps([one.laddr.ip for one in found if one.status == "LISTEN"]))
"""


@pytest.mark.parametrize("backend", ["gloo", "curve"])
async def test_servers_of_other_hosts_get_every_version(hosts: Hosts, backend: str) -> None:
    learner = await hosts.start(0, "weights_host_learner.py", "learner", backend=backend)
    servers = [await hosts.start(host, "weights_child.py", f"r{host}") for host in (1, 2)]
    for version in range(2):
        content = (await learner.ask(version=version))["content"]
        loads = await asyncio.gather(
            *(server.hears(event="loaded", version=version) for server in servers)
        )
        assert [(load["content"], load["transferred"]) for load in loads] == [(content, True)] * 2
    for host, process in enumerate((learner, *servers)):
        allowed = {hosts.network.addresses[host]}
        assert listening(hosts.network, host, process) <= allowed, "only the host's own interface"
    metrics = (await learner.ask(metrics=True))["metrics"]
    assert (
        metrics["weights/failures"],
        metrics["weights/receivers"],
        metrics["weights/shared"],
    ) == (0, 2, 0)


async def test_a_host_that_is_cut_off_costs_only_itself(hosts: Hosts) -> None:
    learner = await hosts.start(
        0, "weights_host_learner.py", "learner", backend="curve", timeout_s=2.0
    )
    stays, leaves = [await hosts.start(host, "weights_child.py", f"r{host}") for host in (1, 2)]
    await learner.ask(version=0)
    await asyncio.gather(
        stays.hears(event="loaded", version=0), leaves.hears(event="loaded", version=0)
    )
    hosts.network.set_link(2, up=False)
    try:
        content = (await learner.ask(version=1))["content"]
        assert (await stays.hears(event="loaded", version=1))["content"] == content
    finally:
        hosts.network.set_link(2, up=True)
    content = (await learner.ask(version=2))["content"]
    assert (await leaves.hears(event="loaded", version=2))["content"] == content


async def test_a_learner_on_loopback_says_what_to_set(hosts: Hosts) -> None:
    learner = await hosts.start(
        0, "weights_host_learner.py", "learner", backend="gloo", interface="lo"
    )
    server = await hosts.start(1, "weights_child.py", "r1")
    await learner.ask(version=0)
    reason = (await server.hears(event="error"))["reason"]
    assert "no answer from the learner's rendezvous 127.0.0.1:" in reason
    assert "set train.weights_interface to the learner's interface" in reason


def test_a_slow_link_delays_and_limits() -> None:
    program = (
        "import socket,sys,time\n"
        "if sys.argv[1] == 'serve':\n"
        "    with socket.create_server(('10.79.0.2', 5555)) as server:\n"
        "        print('up', flush=True)\n"
        "        connection = server.accept()[0]\n"
        "        while data := connection.recv(1 << 16): pass\n"
        "        connection.send(b'!')\n"
        "else:\n"
        "    started = time.monotonic(); connection = socket.create_connection(('10.79.0.2', 5555))\n"
        "    print(time.monotonic() - started)\n"
        "    connection.sendall(bytes(2_000_000)); connection.shutdown(socket.SHUT_WR); connection.recv(1)\n"
        "    print(time.monotonic() - started)\n"
    )
    with host_network(2) as network, slow_tunnel(network, delay_ms=20, mbit_per_s=20):
        serve = [*network.inside(1), sys.executable, "-c", program, "serve"]
        with subprocess.Popen(serve, stdout=subprocess.PIPE) as server:
            assert server.stdout is not None
            server.stdout.readline()
            client = [*network.inside(0), sys.executable, "-c", program, "send"]
            said = subprocess.run(client, capture_output=True, text=True, check=True, timeout=60)
    connected_s, sent_s = map(float, said.stdout.split())
    assert 0.04 <= connected_s < 0.5
    assert 0.8 <= sent_s < 5.0
