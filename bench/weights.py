"""Weight channel against plain gloo broadcasts of the same bytes: two processes, interleaved pairs in one run.

    python -m bench.weights [--pairs 15] [--bucket-mib 32] [--layers 12]

``ratio_transfer``: seconds of one bare broadcast of the whole buffer / seconds of a transfer through the channel over a communicator in use
(handshake, buckets, the receiver's digest, confirmation). ``ratio_end_to_end``: the same against all of it, as a learner and a server do
it: copy into staging, both digests, transfer, and loading as the engine ``hf`` does, which computes from the buffer that it is given while
the next version arrives in another. ``ratio_end_to_end_copied``: in place of that with an engine that copies, by as many threads as there
are cores. ``ratio_to_per_tensor``: a model of many small tensors, seconds of one broadcast per tensor, out of the model and into it /
seconds of all of it through the channel, loaded as by ``hf``.
``delta_bytes_ratio``: bytes of the model / bytes sent in delta mode when 3 % of the elements have changed, anywhere, bfloat16.
``delta_speedup``: seconds of a whole transfer / seconds of that. ``delta_exact``: every received model was the sender's, bit by bit.

Medians over the pairs; ``*_interval`` holds the median of the population with at least 95 % probability, from the order statistics.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from broker import wire
from broker.weights.buffers import Buffers
from broker.weights.cargo import Base
from broker.weights.copying import copy_all, copy_into
from broker.weights.follow import follow
from broker.weights.group import Communicator, Watch, connect_store, serve_store
from broker.weights.membership import Start, session_name
from broker.weights.staging import Flat, Staging, plan_of
from broker.weights.transfer import Settings, lead
from rollout.engines.hf_weights import HeldWeights

HOST: Final = "127.0.0.1"
CPU: Final = torch.device("cpu")
SETTINGS: Final = Settings(timeout_s=60.0, connect_timeout_s=60.0)
WAIT: Final = timedelta(seconds=120)
CHANGED: Final = 0.03
WARM_UP: Final = 2  # pairs: pages, sockets
SMALL_TENSORS: Final = 4_000


def large_model(num_layers: int) -> dict[str, Tensor]:
    """Tensors of a decoder with hidden size 768: 7.1 M parameters a layer and 15.4 M in the embedding, fp32."""
    shapes: dict[str, tuple[int, ...]] = {"embed": (20_000, 768)}
    for layer in range(num_layers):
        shapes |= {
            f"layer-{layer}-attn-qkvo": (4 * 768, 768),
            f"layer-{layer}-mlp-up": (3072, 768),
            f"layer-{layer}-mlp-down": (768, 3072),
            f"layer-{layer}-norm": (768,),
        }
    generator = torch.Generator().manual_seed(0)
    return {name: torch.rand(shape, generator=generator) for name, shape in shapes.items()}


def small_tensors() -> dict[str, Tensor]:
    """4,000 tensors of 8 KiB, the size of what adapters, norms and biases are made of, fp32."""
    generator = torch.Generator().manual_seed(0)
    return {f"t{index:04}": torch.rand(2048, generator=generator) for index in range(SMALL_TENSORS)}


class Holder(torch.nn.Module):
    """Tensors as the parameters of a model."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))


class Channel:
    """One end of a weight channel that carries one model."""

    def __init__(
        self, store: Any, port: int, rank: int, serial: int, model: dict[str, Tensor], bucket_mib: float, *, delta: bool, kept: bool
    ) -> None:
        self.store, self.port, self.rank, self.serial, self.model = store, port, rank, serial, model
        self.plan = plan_of(model, bucket_mib)
        self.staging = Staging(self.plan) if rank == 0 else None
        self.base = Base(self.plan, full_every=10**9) if rank == 0 and delta else None
        self.buffers, self.flat = Buffers(kept=kept), Flat(self.plan)
        self.engine = HeldWeights(Holder(model)) if kept else None
        self.communicator: Communicator | None = None
        self.uses = 0
        self.sent_bytes = 0

    def transfer(self, version: int, digest: str = "") -> None:
        """What lies in staging, or is being packed, to the other end."""
        session = session_name(1, self.serial, self.uses)
        self.uses += 1
        if self.staging is not None:
            start = Start(session, version, ("receiver",), fresh=self.uses == 1)
            with self.staging.sending(version) as staged:
                sent = lead(self.store, start, staged, self.communicator, SETTINGS, Watch(), self.base)
            self.communicator, self.sent_bytes = sent.communicator, sent.size_bytes
        else:
            answer = wire.WeightsSession(
                session=session, rank=1, world_size=2, host=HOST, port=self.port, version=version, timeout_s=SETTINGS.timeout_s
            )
            arrival = self.buffers.take(self.plan, CPU)
            received = follow(self.store, answer, digest, arrival, self.communicator, SETTINGS, Watch())
            self.communicator, self.flat = received.communicator, arrival.flat
            self.buffers.arrived(arrival, received.digest)

    def packed(self, version: int) -> None:
        """The sender's part before the wire, by itself: copy and digest."""
        if self.staging is not None:
            self.staging.write(version, self.model)
            self.staging.digest(version)

    def whole(self, version: int) -> None:
        """Copy, digests, transfer, load; on the sender in three threads, as in ``broker.weights.send``."""
        if self.staging is None:
            self.transfer(version)
            if self.engine is not None:
                self.engine.load(self.flat.tensors)
            else:
                copy_all((self.model[name], view) for name, view in self.flat.tensors.items())
            return
        staging, begun = self.staging, threading.Event()
        threads = [threading.Thread(target=staging.write, args=(version, self.model, begun.set))]
        threads[0].start()
        begun.wait()
        threads.append(threading.Thread(target=staging.digest, args=(version,)))
        threads[1].start()
        self.transfer(version)
        for thread in threads:
            thread.join()


class End:
    """One process; the two run the same rounds in lockstep."""

    def __init__(self, rank: int, port: int, options: argparse.Namespace) -> None:
        torch.set_num_threads(1)
        self.rank, self.port, self.options = rank, port, options
        self.store = connect_store(HOST, port, 60.0)
        self.bare = Communicator(self.store, "bare", rank, 2, backend="gloo", host=HOST, timeout_s=60.0, connect_timeout_s=60.0)
        self.meetings, self.channels = 0, 0

    def channel(self, model: dict[str, Tensor], *, delta: bool = False, kept: bool = True) -> Channel:
        self.channels += 1
        return Channel(self.store, self.port, self.rank, self.channels, model, self.options.bucket_mib, delta=delta, kept=kept)

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

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Each by itself, one after the other."""
        for tensor in tensors:
            self.bare._issue(tensor).wait()

    def pairs(self, *calls: Callable[[int], None]) -> list[list[float]]:
        """Seconds of each call, pair by pair; the order is turned round from pair to pair."""
        taken: list[list[float]] = []
        for pair in range(-WARM_UP, self.options.pairs):
            order = list(enumerate(calls))
            seconds = {which: self.timed(partial(call, pair + 100)) for which, call in (order if pair % 2 else order[::-1])}
            if pair >= 0:
                taken.append([seconds[which] for which in range(len(calls))])
        return taken


def measure_large(end: End) -> dict[str, Any]:
    """One large model: bare broadcast, transfer alone, all of it."""
    model = large_model(end.options.layers)
    channel, copied, buffer = end.channel(model), end.channel(model, kept=False), Flat(plan_of(model, end.options.bucket_mib)).buffer
    versions = {channel: -1, copied: -1}  # in staging

    def whole(channel: Channel) -> None:
        versions[channel] += 1
        channel.whole(versions[channel])

    whole(channel)  # so that there is a version to transfer
    pairs = end.pairs(
        lambda pair: end.broadcast([buffer]),
        lambda pair: channel.transfer(versions[channel]),
        lambda pair: whole(channel),
        lambda pair: whole(copied),
    )
    return {"size_bytes": channel.plan.size_bytes, "pairs": pairs}


def measure_small(end: End) -> dict[str, Any]:
    """Many small tensors: one broadcast each, and all through the channel."""
    model = small_tensors()
    channel, tensors = end.channel(model), list(model.values())
    return {"pairs": end.pairs(lambda pair: end.broadcast(tensors), channel.whole)}


def measure_delta(end: End) -> dict[str, Any]:
    """Versions that differ in 3 % of their elements, against whole ones of the same model."""
    model = {name: tensor.bfloat16() for name, tensor in large_model(end.options.layers).items()}
    full, changes = end.channel(model), end.channel(model, delta=True)
    generator = torch.Generator().manual_seed(1)
    exact: list[bool] = []
    sent: list[int] = []

    def step(pair: int) -> None:
        """Both ends know what the sender's weights are now; only the sender's are."""
        for name, tensor in truth.items():
            bits = tensor.view(torch.int16)
            bits[torch.rand(tensor.shape, generator=generator) < CHANGED] ^= 0x155
            if end.rank == 0:
                copy_into(model[name], tensor)

    def send_changes(pair: int) -> None:
        changes.whole(pair)
        sent.append(changes.sent_bytes)

    truth = {name: tensor.clone() for name, tensor in model.items()}
    changes.whole(0)
    pairs = []
    for pair in range(end.options.pairs):
        step(pair)
        pairs.append([end.timed(partial(full.whole, pair + 1)), end.timed(partial(send_changes, pair + 1))])
        exact.append(all(torch.equal(changes.flat.tensors[name].view(torch.int16), truth[name].view(torch.int16)) for name in truth))
    end.store.set(f"exact/{end.rank}", str(all(exact)))
    end.store.wait(["exact/1"], WAIT)
    return {
        "pairs": pairs,
        "bytes": [changes.plan.size_bytes / size for size in sent if size],
        "exact": end.store.get("exact/1") == b"True",
    }


def run(rank: int, port: int, options: argparse.Namespace, results: Any) -> None:
    """All rounds of one end; the sender puts what was measured."""
    end = End(rank, port, options)
    measured = {"large": measure_large(end), "small": measure_small(end), "delta": measure_delta(end)}
    if rank == 0:
        results.put(measured)
    end.meet()


def interval(values: Sequence[float]) -> list[float]:
    """Two of the values between which the population's median lies with at least 95 % probability; from 6 values on."""
    ordered, n = sorted(values), len(values)
    outside = 0
    while outside + 1 < n / 2 and 2 * sum(math.comb(n, k) for k in range(outside + 2)) / 2**n <= 0.05:
        outside += 1
    return [round(ordered[outside], 3), round(ordered[n - 1 - outside], 3)]


def figures_of(measured: dict[str, Any]) -> dict[str, Any]:
    """The medians and their intervals."""
    large, small, delta = measured["large"], measured["small"], measured["delta"]
    ratios = {
        "ratio_transfer": [bare / transfer for bare, transfer, _, _ in large["pairs"]],
        "ratio_end_to_end": [bare / whole for bare, _, whole, _ in large["pairs"]],
        "ratio_end_to_end_copied": [bare / copied for bare, _, _, copied in large["pairs"]],
        "ratio_to_per_tensor": [each / whole for each, whole in small["pairs"]],
        "delta_bytes_ratio": delta["bytes"],
        "delta_speedup": [full / changes for full, changes in delta["pairs"]],
    }
    gbytes = large["size_bytes"] / 1e9
    figures: dict[str, Any] = {}
    for name, values in ratios.items():
        figures |= {name: round(statistics.median(values), 3), f"{name}_interval": interval(values)}
    return figures | {
        "delta_exact": delta["exact"],
        "gloo_gbytes_per_s": round(statistics.median(gbytes / bare for bare, *_ in large["pairs"]), 3),
        "transfer_gbytes_per_s": round(statistics.median(gbytes / transfer for _, transfer, *_ in large["pairs"]), 3),
        "size_bytes": large["size_bytes"],
        "pairs": len(large["pairs"]),
    }


def main() -> None:
    """Measure, print, and end with one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench.weights", description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--bucket-mib", type=float, default=32.0)
    parser.add_argument("--layers", type=int, default=12)
    options = parser.parse_args()
    if options.pairs < 7:
        parser.error(f"--pairs {options.pairs} is not allowed; at least 7")
    store, port = serve_store(HOST)
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    ends = [context.Process(target=run, args=(rank, port, options, results)) for rank in range(2)]
    for end in ends:
        end.start()
    measured = results.get(timeout=900)
    for end in ends:
        end.join()
    del store
    print(json.dumps(figures_of(measured)))


if __name__ == "__main__":
    main()
