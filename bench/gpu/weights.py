"""Measure weight transfer between devices in GB/s, against the limits of device and link.

One GPU suffices for device_copy (between buffers on it), pack (a model's tensors into the channel's
buffer), digest (of that buffer), to_host and from_host (pinned memory). Two are needed for link (a
copy between them), broadcast (one NCCL broadcast of the whole buffer) and channel (the same bytes
in buckets, digested on arrival), whose ratio to broadcast is ratio_transfer. NCCL does not accept
two members on one GPU; with one GPU these are null.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
from collections.abc import Callable
from typing import Any, Final

import torch

from bench.gpu import common
from bench.support.rendezvous import MeetingPlace, serve_place
from broker.weights.carriers import CARRIERS
from broker.weights.digest import combine, digest_bucket
from broker.weights.group import WaitMonitor
from broker.weights.memory.staging import FlatBuffer, plan_of
from broker.weights.protocol.session import TransferSettings

HOST: Final = "127.0.0.1"
WAIT_S: Final = 120.0


def main(arguments: list[str] | None = None) -> int:
    made = common.parser(__doc__)
    made.add_argument("--bucket-mib", type=float, default=None, help="(256, or 1)")
    made.add_argument("--repeats", type=int, default=7)
    return common.run(_measure, made, arguments)


def _measure(options: argparse.Namespace, device: str) -> int:
    shape = common.TINY if options.tiny else common.HALF_BILLION
    bucket_mib = options.bucket_mib or (1.0 if options.tiny else 256.0)
    figures, checks = _alone(options, shape, bucket_mib)
    ends = torch.cuda.device_count() if options.device == "cuda" else 2
    if ends < 2:
        print(
            "one GPU: link, broadcast and channel need two, for NCCL takes no two members on one",
            flush=True,
        )
        names = (
            "link_gbytes_per_s",
            "broadcast_gbytes_per_s",
            "channel_gbytes_per_s",
            "ratio_transfer",
        )
        between: dict[str, Any] = dict.fromkeys(names)
    else:
        between, exact = _between(options, shape, bucket_mib)
        checks["received_bit_by_bit"] = exact
    figures |= between | {"gpus": ends if options.device == "cuda" else 0}
    return common.finish("weights", device, shape, figures, checks)


def tensors_of(
    shape: common.ModelShape, device: str, dtype: torch.dtype = torch.bfloat16
) -> dict[str, torch.Tensor]:
    """Return random tensors of a model by name."""
    hidden = shape.hidden
    inner = shape.intermediate
    heads = shape.heads * shape.head_dim
    kv = shape.kv_heads * shape.head_dim
    sizes: dict[str, tuple[int, ...]] = {"embed": (shape.vocab, hidden), "norm": (hidden,)}
    for layer in range(shape.layers):
        at = f"layers.{layer}"
        sizes |= {f"{at}.q": (heads, hidden), f"{at}.k": (kv, hidden)}
        sizes |= {f"{at}.v": (kv, hidden), f"{at}.o": (hidden, heads)}
        sizes |= {
            f"{at}.gate": (inner, hidden),
            f"{at}.up": (inner, hidden),
            f"{at}.down": (hidden, inner),
        }
        sizes |= {f"{at}.q_norm": (shape.head_dim,), f"{at}.k_norm": (shape.head_dim,)}
        sizes |= {f"{at}.norm1": (hidden,), f"{at}.norm2": (hidden,)}
    torch.manual_seed(0)
    return {name: torch.randn(size, dtype=dtype, device=device) for name, size in sizes.items()}


def _alone(
    options: argparse.Namespace, shape: common.ModelShape, bucket_mib: float
) -> tuple[dict[str, Any], dict[str, bool]]:
    tensors = tensors_of(shape, options.device)
    plan = plan_of(tensors, bucket_mib)
    flat = FlatBuffer(plan, options.device)
    other = torch.empty(plan.size_bytes, dtype=torch.uint8, device=options.device)
    pinned = torch.empty(plan.size_bytes, dtype=torch.uint8, pin_memory=options.device == "cuda")

    def rate(work: Callable[[], object]) -> float:
        taken = common.seconds(work, options.device, repeats=options.repeats)
        return round(plan.size_bytes / 1e9 / statistics.median(taken), 3)

    flat.fill(tensors)
    figures: dict[str, Any] = {"size_bytes": plan.size_bytes, "buckets": len(plan.buckets)}
    figures |= {"device_copy_gbytes_per_s": rate(lambda: other.copy_(flat.buffer))}
    figures |= {
        "pack_gbytes_per_s": rate(lambda: flat.fill(tensors)),
        "digest_gbytes_per_s": rate(flat.digest),
    }
    figures |= {"to_host_gbytes_per_s": rate(lambda: pinned.copy_(flat.buffer, non_blocking=True))}
    figures |= {
        "from_host_gbytes_per_s": rate(lambda: flat.buffer.copy_(pinned, non_blocking=True))
    }
    blocks, embedding = common.num_parameters(shape)
    same = all(torch.equal(flat.tensors[name], tensor) for name, tensor in tensors.items())
    holds = sum(tensor.numel() for tensor in tensors.values()) == blocks + embedding
    return figures, {"packed_bit_by_bit": same, "tensors_hold_every_parameter": holds}


def _between(
    options: argparse.Namespace, shape: common.ModelShape, bucket_mib: float
) -> tuple[dict[str, Any], bool]:
    server, place = serve_place(HOST)
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    arguments = (place, options.device, shape, bucket_mib, options.repeats, results)
    ends = [context.Process(target=_end, args=(rank, *arguments)) for rank in range(2)]
    for end in ends:
        end.start()
    found = results.get(timeout=600)
    for end in ends:
        end.join()
    server.close()
    link = _link(shape, options) if options.device == "cuda" else None
    size = found["size_bytes"] / 1e9
    ratios = [bare / ours for bare, ours in zip(found["bare"], found["channel"], strict=True)]
    figures = {"link_gbytes_per_s": link}
    figures |= {"broadcast_gbytes_per_s": round(size / statistics.median(found["bare"]), 3)}
    figures |= {"channel_gbytes_per_s": round(size / statistics.median(found["channel"]), 3)}
    figures |= {"ratio_transfer": round(statistics.median(ratios), 3)}
    return figures, bool(found["exact"])


def _link(shape: common.ModelShape, options: argparse.Namespace) -> float:
    """Measure copies from the first GPU to the second."""
    size = plan_of(tensors_of(shape, "meta"), 256.0).size_bytes
    source, target = (
        torch.zeros(size, dtype=torch.uint8, device=f"cuda:{index}") for index in range(2)
    )
    taken = common.seconds(lambda: target.copy_(source), "cuda", repeats=options.repeats)
    return round(size / 1e9 / statistics.median(taken), 3)


def _end(
    rank: int,
    place: MeetingPlace,
    kind: str,
    shape: common.ModelShape,
    bucket_mib: float,
    repeats: int,
    results: Any,
) -> None:
    """Broadcast in lockstep with the other end; the receiver reports, because it sees the last
    byte.
    """
    device = f"cuda:{rank}" if kind == "cuda" else "cpu"
    if kind == "cuda":
        torch.cuda.set_device(rank)
    store = place.connect()
    settings = TransferSettings(host=HOST, timeout_s=WAIT_S, connect_timeout_s=60.0)
    group = CARRIERS["nccl" if kind == "cuda" else "gloo"].open_group(
        store, "bench", rank=rank, size=2, settings=settings
    )
    tensors = tensors_of(shape, device)
    flat = FlatBuffer(plan_of(tensors, bucket_mib), device)
    if rank == 0:
        flat.fill(tensors)
    parts = [flat.bucket(index) for index in range(len(flat.plan.buckets))]
    digests: dict[int, bytes] = {}

    def arrived(index: int) -> None:
        if rank == 1:
            digests[index] = digest_bucket(parts[index])

    def send(buckets: list[torch.Tensor], done: Callable[[int], None]) -> None:
        group.broadcast(buckets, WaitMonitor(), done=done, peek=lambda: None)

    bare = []
    channel = []
    for _ in range(repeats):
        bare += common.seconds(
            lambda: send([flat.buffer], lambda index: None), kind, repeats=1, warm_up=1
        )
        channel += common.seconds(lambda: send(parts, arrived), kind, repeats=1, warm_up=1)
    if rank == 0:
        store.set("digest", flat.digest())
    else:
        exact = (
            combine([digests[index] for index in sorted(digests)]) == store.get("digest").decode()
        )
        results.put(
            {"bare": bare, "channel": channel, "exact": exact, "size_bytes": flat.plan.size_bytes}
        )
    store.set(f"done/{rank}", "")
    store.wait([f"done/{1 - rank}"])


if __name__ == "__main__":
    sys.exit(main())
