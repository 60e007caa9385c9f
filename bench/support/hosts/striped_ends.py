"""Two learner hosts of two ranks each and a server's host, all with limited links: stripes against
one sender.

Both ways begin when every rank holds its rows of the new weights and end when the server has
confirmed the digest. The first stages and sends each rank's rows (broker.weights.stripes). The
second gathers the rows on rank 0 tensor by tensor, while rank 0 packs, digests and broadcasts what
has come, as a learner does that does not send in stripes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from bench.support.hosts.network_namespaces import HostNetwork
from broker.contract import wire
from broker.weights.group import Group, WaitMonitor
from broker.weights.memory.staging import StagingBuffers, plan_of
from broker.weights.protocol.session import TransferSettings, session_name
from broker.weights.receiver.buffers import ReceiveBuffers
from broker.weights.receiver.follow import follow
from broker.weights.rendezvous.board_client import BoardClient, KeyPair, RendezvousAddress
from broker.weights.rendezvous.board_server import BoardServer
from broker.weights.sender.membership import StartTransfer
from broker.weights.sender.transfer import lead
from broker.weights.stripes.layout import row_run, stripe_plan
from broker.weights.stripes.lead import lead_stripes
from broker.weights.stripes.partial_digest import digest_of_parts
from broker.weights.stripes.stripe import STRIPES_KEY, StripeRank

RANKS: Final = 4
HOST_OF: Final = (0, 0, 1, 1)  # of each rank; the server is on host 2
WIDTH: Final = 1024
TIMEOUT_S: Final = 60.0
WAYS: Final = ("striped", "gathered")


def shapes_of(layers: int) -> dict[str, Tensor]:
    """Return a model of 9 * 2**20 parameters a layer, on the meta device; rows divide by the number
    of ranks.
    """
    sizes = {"attention": WIDTH, "up": 4 * WIDTH, "down": 4 * WIDTH}
    names = {
        f"layers.{layer:02d}.{name}": rows
        for layer in range(layers)
        for name, rows in sizes.items()
    }
    return {name: torch.empty(rows, WIDTH, device="meta") for name, rows in names.items()}


@dataclass
class Settings:
    """What one end is told, as JSON on its standard input."""

    layers: int
    pairs: int
    bucket_mib: float
    hosts: list[str]
    meeting_port: int
    port: int = 0  # of the rendezvous
    key: str = ""
    keys: list[list[str]] | None = None  # public and secret of ranks 1 … 3 and the server

    def transfer(self, host: int) -> TransferSettings:
        return TransferSettings(
            host=self.hosts[host], timeout_s=TIMEOUT_S, connect_timeout_s=TIMEOUT_S
        )

    def client(self, number: int) -> BoardClient:
        """Return the connection of a rank above 0, or of the server, which is number ``RANKS``."""
        assert self.keys is not None
        public, secret = self.keys[number - 1]
        address = RendezvousAddress(self.hosts[0], self.port, self.key)
        return BoardClient(address, KeyPair(public, secret.encode()), TIMEOUT_S)


class GatheredRows(Mapping[str, Tensor]):
    """The whole tensors on rank 0, gathered from the ranks' rows as they are read in order of their
    names.
    """

    def __init__(self, rows: Mapping[str, Tensor]) -> None:
        self._rows = rows

    def __getitem__(self, name: str) -> Tensor:
        own = self._rows[name]
        parts = [torch.empty_like(own) for _ in range(RANKS)] if dist.get_rank() == 0 else None
        dist.gather(own, parts, dst=0)
        return own if parts is None else torch.cat(parts)

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


class Rank:
    """One rank of the learner."""

    def __init__(self, rank: int, settings: Settings) -> None:
        self.rank = rank
        self.settings = settings
        shapes = shapes_of(settings.layers)
        self.model = plan_of(shapes, settings.bucket_mib)
        each = {name: len(tensor) // RANKS for name, tensor in shapes.items()}
        self.runs = {
            name: row_run(name, shapes[name].shape, rank * rows, rows)
            for name, rows in each.items()
        }
        generator = torch.Generator().manual_seed(rank)
        self.rows = {
            name: torch.rand(rows, WIDTH, generator=generator) for name, rows in each.items()
        }
        self.stripe = StripeRank(rank, self.model, stripe_plan(self.model, self.runs.values()))

    def stage(self, version: int) -> Tensor:
        sums = self.stripe.stage(
            version, {run.key: self.rows[name].view(-1) for name, run in self.runs.items()}
        )
        dist.reduce(sums, 0)
        return sums

    def change(self) -> None:
        for tensor in self.rows.values():
            tensor[:8].add_(0.5)

    def gather(self) -> None:
        """Take part in rank 0's gathering."""
        gathered = GatheredRows(self.rows)
        for name in sorted(self.rows):
            _ = gathered[name]


class Leader(Rank):
    """Rank 0.

    Attributes:
        plans: of all stripes.
    """

    def __init__(self, settings: Settings, server: BoardServer) -> None:
        super().__init__(0, settings)
        self.own, self.store = self.stripe, server.store(TIMEOUT_S)
        ranks = [self, *(Rank(rank, settings) for rank in range(1, RANKS))]
        self.plans = [rank.stripe.plan for rank in ranks]
        server.keep(STRIPES_KEY, msgspec.json.encode([plan.text for plan in self.plans]))
        self.staging, self.uses = StagingBuffers(self.model), dict.fromkeys(WAYS, 0)
        self.group: Group | None = None

    def start(self, way: str, version: int) -> StartTransfer:
        uses = self.uses[way]
        self.uses[way] = self.uses[way] + 1
        return StartTransfer(
            session_name(1, 1 + WAYS.index(way), uses), version, ("server",), fresh=uses == 0
        )

    def striped(self, version: int) -> None:
        start = self.start("striped", version)
        number = self.uses["striped"] - 1
        digest = digest_of_parts(self.model, self.stage(version))
        transfer = self.settings.transfer(0)
        lead_stripes(self.store, start, self, number, digest, transfer, WaitMonitor())  # type: ignore[arg-type]

    def gathered(self, version: int) -> None:
        start = self.start("gathered", version)
        begun = threading.Event()
        write = threading.Thread(
            target=self.staging.write, args=(version, GatheredRows(self.rows), begun.set)
        )
        write.start()
        begun.wait()
        digest = threading.Thread(target=self.staging.digest, args=(version,))
        digest.start()
        with self.staging.sending(version) as staged:
            sent = lead(
                self.store, start, staged, self.group, self.settings.transfer(0), WaitMonitor()
            )
        self.group = sent.communicator
        write.join()
        digest.join()


def run_rank(rank: int, settings: Settings) -> None:
    """Run one rank; rank 0 prints where the rendezvous is, and then the seconds of each way, pair
    by pair.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    server: BoardServer | None = None
    if rank == 0:
        server = BoardServer(settings.hosts[0])
        keys = [KeyPair.make() for _ in range(RANKS)]
        for number, pair in enumerate(keys, 1):
            server.admit(f"end-{number}", pair.public)
        settings.keys = [[pair.public, pair.secret.decode()] for pair in keys]
        print(
            json.dumps({"port": server.port, "key": server.key, "keys": settings.keys}), flush=True
        )
    meeting = dist.TCPStore(  # type: ignore[attr-defined]
        settings.hosts[0], settings.meeting_port, RANKS, rank == 0, timedelta(seconds=TIMEOUT_S)
    )
    dist.init_process_group("gloo", store=meeting, rank=rank, world_size=RANKS)
    if rank:
        follow_leader(Rank(rank, settings))
        return
    assert server is not None
    leader = Leader(settings, server)
    seconds = dict[str, list[float]]()
    for version in range(2 * (settings.pairs + 1)):  # the first pair is not counted: it connects
        way = way_of(version)
        dist.barrier()
        leader.change()
        began = time.perf_counter()
        leader.striped(version) if way == "striped" else leader.gathered(version)
        seconds.setdefault(way, []).append(time.perf_counter() - began)
    dist.barrier()
    pairs = list(zip(*(seconds[way][1:] for way in WAYS), strict=True))
    print(json.dumps({"pairs": pairs, "size_bytes": leader.model.size_bytes}), flush=True)
    leader.stripe.close()
    dist.destroy_process_group()
    server.close()


def way_of(version: int) -> str:
    """Return which way a version takes: the ways alternate, and so does which of them is first in a
    pair.
    """
    return WAYS[(version + version // 2) % 2]


def follow_leader(rank: Rank) -> None:
    """Do what rank 0 does with a rank above 0."""
    settings = rank.settings
    rank.stripe.serve(settings.client(rank.rank), settings.transfer(HOST_OF[rank.rank]))
    for version in range(2 * (settings.pairs + 1)):
        dist.barrier()
        rank.change()
        rank.stage(version) if way_of(version) == "striped" else rank.gather()
    dist.barrier()
    rank.stripe.close()
    dist.destroy_process_group()


def run_server(settings: Settings) -> None:
    """Receive every version; the digest of each is compared with the learner's."""
    store = settings.client(RANKS)
    plan = plan_of(shapes_of(settings.layers), settings.bucket_mib)
    buffers = ReceiveBuffers(kept=False)
    groups = dict[str, Group | None]()
    uses = dict.fromkeys(WAYS, 0)
    for version in range(2 * (settings.pairs + 1)):
        way = way_of(version)
        session = wire.WeightsSession(
            session=session_name(1, 1 + WAYS.index(way), uses[way]), rank=1, world_size=2, host=settings.hosts[0],
            port=settings.port, key=settings.key, version=version, timeout_s=TIMEOUT_S,
        )  # fmt: skip
        uses[way] += 1
        arrival = buffers.take(plan, torch.device("cpu"))
        received = follow(
            store, session, "", arrival, groups.get(way), settings.transfer(2), WaitMonitor()
        )
        groups[way] = received.communicator
        assert arrival.flat.digest() == received.digest, "the bytes are the learner's"
        buffers.arrived(arrival, received.digest)


def measure_stripes(
    network: HostNetwork, *, layers: int, pairs: int, bucket_mib: float = 8.0
) -> dict[str, Any]:
    """Run all ends on the first three hosts of a network; return the pairs of seconds and the
    model's size.

    Raises:
        RuntimeError: if an end fails.
    """
    settings = Settings(layers, pairs, bucket_mib, network.addresses[:3], meeting_port=29500)
    leader = _start(network, 0, "0", settings)
    told = json.loads(leader.stdout.readline() or "{}")
    if not told:
        raise RuntimeError(f"rank 0 exited with {leader.wait(30)}")
    settings.port = told["port"]
    settings.key = told["key"]
    settings.keys = told["keys"]
    ends = [_start(network, HOST_OF[rank], str(rank), settings) for rank in range(1, RANKS)]
    ends.append(_start(network, 2, "server", settings))
    measured, _ = leader.communicate(timeout=900)
    codes = [leader.returncode, *(end.wait(60) for end in ends)]
    if any(codes):
        raise RuntimeError(f"the ends exited with {codes}")
    found: dict[str, Any] = json.loads(measured.splitlines()[-1])
    return found


def limit_links(network: HostNetwork, mbit_per_s: list[int]) -> None:
    """Limit each host's link in both directions."""
    for host, rate in enumerate(mbit_per_s):
        queue = ["root", "tbf", "rate", f"{rate}mbit", "burst", "256kb", "latency", "50ms"]
        tc = ["tc", "qdisc", "replace", "dev"]
        subprocess.run(
            [*network.inside(host), *tc, "eth0", *queue], check=True, capture_output=True
        )
        bridge = ["nsenter", f"--net=/run/netns/{network.bridge}"]
        subprocess.run([*bridge, *tc, f"host{host}", *queue], check=True, capture_output=True)


def _start(network: HostNetwork, host: int, which: str, settings: Settings) -> Any:
    command = [*network.inside(host), sys.executable, "-m", __name__, which]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    output = subprocess.PIPE if which == "0" else None
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=output, text=True, env=environment
    )
    assert process.stdin is not None, "a pipe was asked for"
    process.stdin.write(msgspec.json.encode(settings).decode() + "\n")
    process.stdin.close()
    process.stdin = None
    return process


if __name__ == "__main__":
    torch.set_num_threads(1)
    given = msgspec.json.decode(sys.stdin.readline(), type=Settings)
    run_server(given) if sys.argv[1] == "server" else run_rank(int(sys.argv[1]), given)
