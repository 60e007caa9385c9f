"""Weight channel against a bare gloo broadcast of the same bytes: two processes, one model, interleaved pairs in one run.

    python -m bench.weights [--pairs 9] [--bucket-mib 32] [--layers 12]

``ratio_to_gloo``: seconds of one bare broadcast of the whole buffer / seconds of a transfer through the channel over a communicator in use
(handshake, buckets, the receiver's digest, confirmation). ``ratio_end_to_end``: the same against all of it: copy into staging,
digest, transfer, load into the model. Medians over the pairs; the quartiles stand on the line before.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from broker import wire
from broker.weights.group import Communicator, Watch, connect_store, serve_store
from broker.weights.membership import Start, session_name
from broker.weights.staging import Flat, Staging, plan_of
from broker.weights.transfer import Settings, follow, lead

HOST = "127.0.0.1"
SETTINGS = Settings(timeout_s=60.0, connect_timeout_s=60.0)
WAIT = timedelta(seconds=120)


def make_model(num_layers: int) -> dict[str, Tensor]:
    """Tensors of a decoder with hidden size 768: 7.1 M parameters a layer and 15.4 M in the embedding, fp32."""
    shapes: dict[str, tuple[int, ...]] = {"embed": (20_000, 768)}
    for layer in range(num_layers):
        shapes |= {
            f"layers.{layer}.attn.qkvo": (4 * 768, 768),
            f"layers.{layer}.mlp.up": (3072, 768),
            f"layers.{layer}.mlp.down": (768, 3072),
            f"layers.{layer}.norm": (768,),
        }
    generator = torch.Generator().manual_seed(0)
    return {name: torch.rand(shape, generator=generator) for name, shape in shapes.items()}


class Peer:
    """One end; the two run the same rounds in lockstep."""

    def __init__(self, rank: int, port: int, options: argparse.Namespace) -> None:
        torch.set_num_threads(1)
        self.rank, self.port = rank, port
        self.model = make_model(options.layers)
        self.plan = plan_of(self.model, options.bucket_mib)
        self.store = connect_store(HOST, port, 60.0)
        self.bare = Communicator(self.store, "bare", rank, 2, backend="gloo", host=HOST, timeout_s=60.0, connect_timeout_s=60.0)
        self.channel: Communicator | None = None
        self.uses, self.meetings = 0, 0
        self.buffer = Flat(self.plan).buffer
        self.staging = Staging(self.plan) if rank == 0 else None
        self.flat = Flat(self.plan)

    def meet(self) -> None:
        """Both ends are here."""
        self.meetings += 1
        self.store.set(f"meet/{self.meetings}/{self.rank}", "")
        self.store.wait([f"meet/{self.meetings}/{1 - self.rank}"], WAIT)

    def timed(self, call: Callable[[], None]) -> float:
        """Seconds until both ends are done."""
        self.meet()
        started = time.perf_counter()
        call()
        self.meet()
        return time.perf_counter() - started

    def bare_round(self) -> None:
        self.bare.broadcast([self.buffer], Watch(), done=lambda index: None, peek=lambda: None)

    def transfer_round(self) -> None:
        """One transfer of what lies in staging."""
        session = session_name(1, 1, self.uses)
        self.uses += 1
        if self.staging is not None:
            start = Start(session, self.version, ("receiver",), fresh=self.uses == 1)
            with self.staging.sending(self.version) as flat:
                self.channel, _ = lead(self.store, start, flat, self.channel, SETTINGS, Watch())
        else:
            answer = wire.WeightsSession(
                session=session, rank=1, world_size=2, host=HOST, port=self.port, version=self.version, timeout_s=SETTINGS.timeout_s
            )
            digest = self.store.get(f"digest/{self.version}").decode()
            self.channel = follow(self.store, answer, digest, self.flat, self.channel, SETTINGS, Watch())

    def pack(self, version: int) -> None:
        """The sender's part before the wire: copy and digest."""
        self.version = version
        if self.staging is not None:
            self.staging.write(version, self.model)
            self.store.set(f"digest/{version}", self.staging.digest(version) or "")

    def whole_round(self, version: int) -> None:
        self.pack(version)
        self.transfer_round()
        if self.rank == 1:
            for name, view in self.flat.tensors.items():
                self.model[name].copy_(view)


def run(rank: int, port: int, options: argparse.Namespace, results: Any) -> None:
    """All rounds of one end; the sender puts its times."""
    peer = Peer(rank, port, options)
    pairs = []
    for pair in range(-2, options.pairs):  # two to warm up: pages, sockets
        peer.pack(2 * pair + 100)
        rounds = [peer.bare_round, peer.transfer_round]
        seconds = {call: peer.timed(call) for call in (rounds if pair % 2 else reversed(rounds))}
        bare, transfer = (seconds[call] for call in rounds)
        whole = peer.timed(lambda pair=pair: peer.whole_round(2 * pair + 101))  # type: ignore[misc]
        if pair >= 0:
            pairs.append((bare, transfer, whole))
    if rank == 0:  # alone, while the other waits
        digest_s, copy_s = median_seconds(peer.flat.digest), median_seconds(lambda: peer.flat.fill(peer.model))
        results.put((peer.plan.size_bytes, pairs, digest_s, copy_s))
    peer.meet()


def median_seconds(call: Callable[[], object]) -> float:
    """Median of seven calls."""
    taken = []
    for _ in range(7):
        started = time.perf_counter()
        call()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def summary(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.3f} ({low:.3f}-{high:.3f})"


def main() -> None:
    """Measure, print, and end with one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench.weights", description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--bucket-mib", type=float, default=32.0)
    parser.add_argument("--layers", type=int, default=12)
    options = parser.parse_args()
    store, port = serve_store(HOST)
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    peers = [context.Process(target=run, args=(rank, port, options, results)) for rank in range(2)]
    for peer in peers:
        peer.start()
    size_bytes, pairs, digest_s, copy_s = results.get(timeout=600)
    for peer in peers:
        peer.join()
    del store
    to_gloo = [bare / transfer for bare, transfer, _ in pairs]
    end_to_end = [bare / whole for bare, _, whole in pairs]
    gbytes = size_bytes / 1e9
    print(f"{gbytes:.3f} GB in buckets of {options.bucket_mib:g} MiB, {len(pairs)} pairs, median (quartiles)")
    print(f"bare gloo {summary([gbytes / bare for bare, _, _ in pairs])} GB/s, channel {summary([gbytes / t for _, t, _ in pairs])} GB/s")
    print(f"transfer / bare {summary(to_gloo)}, end to end / bare {summary(end_to_end)}")
    figures = {
        "ratio_to_gloo": statistics.median(to_gloo),
        "gbytes_per_s": statistics.median(gbytes / transfer for _, transfer, _ in pairs),
        "ratio_end_to_end": statistics.median(end_to_end),
        "gloo_gbytes_per_s": statistics.median(gbytes / bare for bare, _, _ in pairs),
        "digest_gbytes_per_s": gbytes / digest_s,
        "copy_gbytes_per_s": gbytes / copy_s,
        "size_bytes": size_bytes,
        "pairs": len(pairs),
    }
    print(json.dumps({name: round(value, 4) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
