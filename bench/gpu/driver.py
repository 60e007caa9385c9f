"""Versions of driver, torch and NCCL, clocks, and one collective over all GPUs: whether anything
else can work.

python -m bench.gpu.driver [--device cpu]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shutil
import statistics
import subprocess
import sys
import time
from importlib.metadata import version
from typing import Any, Final

import torch
import torch.distributed as dist

from bench.gpu import common
from bench.support.rendezvous import MeetingPlace, serve_place

SIZE: Final = {"cuda": 256 << 20, "cpu": 1 << 20}  # bytes of the collective
# by nvidia-smi's names; clocks are those of an idle GPU and the highest that it allows
FIELDS: Final = {
    "driver": "driver_version", "sm_mhz": "clocks.sm", "sm_mhz_max": "clocks.max.sm", "memory_mhz": "clocks.mem",
    "power_limit_w": "power.limit",
}  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    made.set_defaults(tiny=True)
    return common.run(_measure, made, arguments)


def _measure(options: argparse.Namespace, device: str) -> int:
    kind = str(options.device)
    names = (
        [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        if kind == "cuda"
        else []
    )
    devices = names or ["cpu", "cpu"]
    found: dict[str, Any] = {
        "devices": devices,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
    found |= {"transformers": version("transformers"), **_query(kind)}
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if kind == "cuda" else None  # type: ignore[no-untyped-call]
    rate, exact = _all_reduce(kind, len(devices)) if len(devices) > 1 else (None, _computes(kind))
    line: dict[str, Any] = {"bench": "bench.gpu.driver", "device": device, **found, "nccl": nccl}
    failed = [] if exact else ["sums_are_exact"]
    print(json.dumps(line | {"all_reduce_gbytes_per_s": rate, "failed": failed}))
    return 1 if failed else 0


def _query(kind: str) -> dict[str, str | None]:
    """Return what nvidia-smi says of the first GPU; None for each field without it."""
    nothing = dict.fromkeys(FIELDS)
    if kind == "cpu" or shutil.which("nvidia-smi") is None:
        return nothing
    command = [
        "nvidia-smi",
        f"--query-gpu={','.join(FIELDS.values())}",
        "--format=csv,noheader,nounits",
    ]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    values = [field.strip() for field in answer.stdout.partition("\n")[0].split(",")]
    return dict(zip(FIELDS, values, strict=True)) if len(values) == len(FIELDS) else nothing


def _computes(kind: str) -> bool:
    ones = torch.ones(512, 512, device=kind)
    return float((ones @ ones).sum()) == 512.0**3


def _all_reduce(kind: str, size: int) -> tuple[float, bool]:
    """Return the bytes a second of an all-reduce over all GPUs in GB, and whether its sums are
    exact.
    """
    server, place = serve_place("127.0.0.1")
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    ends = [
        context.Process(target=_rank, args=(place, kind, rank, size, results), daemon=True)
        for rank in range(size)
    ]
    for end in ends:
        end.start()
    found = [results.get(timeout=90) for _ in ends]
    for end in ends:
        end.join()
    server.close()
    return round(SIZE[kind] / 1e9 / max(seconds for seconds, _ in found), 3), all(
        exact for _, exact in found
    )


def _rank(place: MeetingPlace, kind: str, rank: int, size: int, results: Any) -> None:
    device = torch.device(kind, rank) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, store=place.connect(), rank=rank, world_size=size)
    values = torch.full((SIZE[kind] // 4,), float(rank + 1), device=device)
    dist.all_reduce(values)
    exact = bool((values == size * (size + 1) / 2).all())
    taken = []
    for _ in range(5):
        common.settle(kind)
        began = time.perf_counter()
        dist.all_reduce(values)
        common.settle(kind)
        taken.append(time.perf_counter() - began)
    results.put((statistics.median(taken), exact))
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
