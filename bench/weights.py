"""Weight channel against plain gloo broadcasts of the same bytes: two processes, interleaved pairs
in one run.

    python -m bench.weights [--pairs 15] [--bucket-mib 32] [--layers 12]

Each figure is seconds of a bare gloo broadcast / seconds of the channel, by shared memory, which is
what a learner and a server of one host use unless told otherwise, and with ``_gloo`` behind its
name by gloo, as between hosts; ``transport`` says which is which.

``ratio_transfer``: one broadcast of the whole buffer / one transfer of a version that lies packed
and digested, over a communicator in use (handshake, buckets, the receiver's digest, confirmation).
``ratio_end_to_end``: the same broadcast / all of it, as a learner and a server do it: copy into
staging, both digests, transfer, and loading as the engine ``hf`` does, which computes from the
buffer that it is given while the next version arrives in another. ``ratio_end_to_end_copied``: the
same with an engine that copies, by as many threads as there are cores. ``ratio_to_per_tensor``: a
model of many small tensors, one broadcast per tensor, out of the model and into it / all of it
through the channel, loaded as by ``hf``. ``delta_bytes_ratio``: bytes of the model / bytes sent in
delta mode, by gloo, when 3 % of the elements have changed, anywhere, bfloat16. ``delta_speedup``:
seconds of a whole transfer / seconds of that. ``delta_exact``: every received model was the
sender's, bit by bit. ``fp8_bytes_ratio``: bytes of the large model as bfloat16 / as FP8.
``fp8_copy_ratio`` and ``fp8_end_to_end_ratio``: seconds as FP8 / as bfloat16, by shared memory, of
the copy that training waits for and of all of it, loaded as by ``hf``; ``..._gloo`` by gloo. A
learner of bfloat16, which copies as it is in one case and quantises in the other. ``fp8_exact``:
what was loaded was what FP8 makes of the model.

Medians over the pairs; ``*_interval`` holds the median of the population with at least 95 %
probability, from the order statistics.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import queue
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import torch

from bench.support.rendezvous import MeetingPlace, serve_place
from bench.support.weights_ends import HOST, ChannelEnd, EndProcess, large_model, small_tensors
from broker.weights import fp8
from broker.weights.memory.copying import copy_into
from broker.weights.memory.staging import FlatBuffer, plan_of

CHANGED: Final = 0.03
TRANSPORTS: Final = ("shared", "gloo")
LARGE: Final = ("transfer", "end_to_end", "end_to_end_copied")  # ratios to one bare broadcast


def measure_large(end: EndProcess) -> dict[str, Any]:
    """Measure one large model: bare broadcast, transfer alone, and the whole path over both
    transports.
    """
    model = large_model(end.options.layers)
    buffer = FlatBuffer(plan_of(model, end.options.bucket_mib)).buffer
    versions: dict[ChannelEnd, int] = {}  # in staging

    def whole(channel: ChannelEnd) -> None:
        versions[channel] = versions.get(channel, -1) + 1
        channel.whole(versions[channel])

    calls: list[Callable[[int], None]] = [lambda pair: end.broadcast([buffer])]
    for transport in TRANSPORTS:
        kept, copied = (
            end.channel(model, shared=transport == "shared", kept=kept) for kept in (True, False)
        )
        whole(kept)  # so that there is a version to transfer
        calls.append(lambda pair, kept=kept: kept.transfer(versions[kept]))  # type: ignore[misc]
        calls += [lambda pair, channel=channel: whole(channel) for channel in (kept, copied)]  # type: ignore[misc]
    pairs = end.pairs(*calls)
    return {"size_bytes": buffer.numel(), "pairs": pairs}


def measure_small(end: EndProcess) -> dict[str, Any]:
    """Measure many small tensors: one broadcast each, and all through the channel."""
    model = small_tensors()
    shared, gloo = (end.channel(model, shared=transport == "shared") for transport in TRANSPORTS)
    tensors = list(model.values())
    return {"pairs": end.pairs(lambda pair: end.broadcast(tensors), shared.whole, gloo.whole)}


def measure_delta(end: EndProcess) -> dict[str, Any]:
    """Measure versions that differ in 3 % of their elements against whole ones."""
    model = {name: tensor.bfloat16() for name, tensor in large_model(end.options.layers).items()}
    full = end.channel(model, shared=False)
    changes = end.channel(model, shared=False, delta=True)
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
        pairs.append(
            [end.timed(partial(full.whole, pair + 1)), end.timed(partial(send_changes, pair + 1))]
        )
        tensors = changes.flat.tensors
        bits = torch.int16
        exact.append(
            all(torch.equal(tensors[name].view(bits), truth[name].view(bits)) for name in truth)
        )
    figures: dict[str, Any] = {
        "pairs": pairs,
        "bytes": [changes.plan.size_bytes / size for size in sent if size],
    }
    return figures | {"exact": end.agreed("delta", end.rank == 0 or all(exact))}


def measure_fp8(end: EndProcess) -> dict[str, Any]:
    """Measure the large model as bfloat16, and as FP8."""
    model = {name: tensor.bfloat16() for name, tensor in large_model(end.options.layers).items()}
    exact = True
    measured: dict[str, Any] = {}
    for transport in TRANSPORTS:
        plain, quantised = (
            end.channel(model, shared=transport == "shared", dtype=dtype)
            for dtype in (None, fp8.NAME)
        )
        pairs = end.pairs(plain.whole, quantised.whole)
        copies = list(
            zip(plain.copies[-len(pairs) :], quantised.copies[-len(pairs) :], strict=True)
        )
        measured[transport] = {"pairs": pairs, "copies": copies}
        if end.rank == 1 and quantised.engine is not None:
            held = quantised.engine.tensors()
            exact = exact and all(
                torch.equal(held[name], fp8.as_sent(name, tensor)) for name, tensor in model.items()
            )
    sizes = plan_of(model, end.options.bucket_mib).size_bytes, quantised.plan.size_bytes
    return {**measured, "bytes": sizes[0] / sizes[1], "exact": end.agreed("fp8", exact)}


def run(rank: int, place: MeetingPlace, options: argparse.Namespace, results: Any) -> None:
    """All rounds of one end; the sender puts what was measured."""
    end = EndProcess(rank, place, options)
    measured: dict[str, Any] = {
        "large": measure_large(end),
        "small": measure_small(end),
        "delta": measure_delta(end),
    }
    measured |= {"fp8": measure_fp8(end)}
    if rank == 0:
        results.put(measured)
    end.meet()


def interval(values: Sequence[float]) -> list[float]:
    """Two of the values between which the population's median lies with at least 95 % probability;
    from 6 values on.
    """
    ordered = sorted(values)
    n = len(values)
    outside = 0
    while (
        outside + 1 < n / 2 and 2 * sum(math.comb(n, k) for k in range(outside + 2)) / 2**n <= 0.05
    ):
        outside += 1
    return [round(ordered[outside], 3), round(ordered[n - 1 - outside], 3)]


def figures_of(measured: dict[str, Any]) -> dict[str, Any]:
    """Return the medians and their intervals."""
    large = measured["large"]
    small = measured["small"]
    delta = measured["delta"]
    ratios: dict[str, list[float]] = {}
    for column, carrier in enumerate(TRANSPORTS):
        suffix = "" if carrier == TRANSPORTS[0] else f"_{carrier}"
        for row, what in enumerate(LARGE):
            ratios[f"ratio_{what}{suffix}"] = [
                pair[0] / pair[1 + row + column * len(LARGE)] for pair in large["pairs"]
            ]
        ratios[f"ratio_to_per_tensor{suffix}"] = [
            pair[0] / pair[1 + column] for pair in small["pairs"]
        ]
    transport = {name: "gloo" if name.endswith("_gloo") else "shared" for name in ratios} | {
        "delta": "gloo"
    }
    speedup = [full / changes for full, changes in delta["pairs"]]
    ratios |= {"delta_bytes_ratio": delta["bytes"], "delta_speedup": speedup}
    for carrier, suffix in zip(TRANSPORTS, ("", "_gloo"), strict=True):
        for what, key in (("copy", "copies"), ("end_to_end", "pairs")):
            ratios[f"fp8_{what}_ratio{suffix}"] = [
                fp8_s / plain_s for plain_s, fp8_s in measured["fp8"][carrier][key]
            ]
    gbytes = large["size_bytes"] / 1e9
    figures: dict[str, Any] = {}
    for name, values in ratios.items():
        figures |= {name: round(statistics.median(values), 3), f"{name}_interval": interval(values)}
    columns = {"gloo": 0, "transfer": 1, "transfer_gloo": 1 + len(LARGE)}
    speeds = {
        f"{name}_gbytes_per_s": round(
            statistics.median(gbytes / pair[column] for pair in large["pairs"]), 3
        )
        for name, column in columns.items()
    }
    figures |= {
        "delta_exact": delta["exact"],
        "fp8_bytes_ratio": round(measured["fp8"]["bytes"], 3),
    }
    figures |= {"fp8_exact": measured["fp8"]["exact"], "transport": transport, **speeds}
    return figures | {"size_bytes": large["size_bytes"], "pairs": len(large["pairs"])}


def _result(results: Any, ends: Sequence[Any]) -> dict[str, Any]:
    while True:
        try:
            measured: dict[str, Any] = results.get(timeout=1.0)
        except queue.Empty:
            if any(end.exitcode for end in ends):
                for end in ends:
                    end.kill()
                raise SystemExit(1) from None
        else:
            return measured


def main() -> None:
    """Measure and print the result."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.weights", description=__doc__.partition("\n")[0] if __doc__ else None
    )
    add = parser.add_argument
    add("--pairs", type=int, default=15)
    add("--bucket-mib", type=float, default=32.0)
    add("--layers", type=int, default=12)
    options = parser.parse_args()
    if options.pairs < 7:
        parser.error(f"--pairs {options.pairs} is not allowed; at least 7")
    server, place = serve_place(HOST)
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    ends = [context.Process(target=run, args=(rank, place, options, results)) for rank in range(2)]
    for end in ends:
        end.start()
    measured = _result(results, ends)
    for end in ends:
        end.join()
    server.close()
    print(json.dumps(figures_of(measured)))


if __name__ == "__main__":
    main()
