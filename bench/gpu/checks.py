"""Compare what only a GPU runs with the CPU: gradients under every memory option, FP8, offloading,
CUDA IPC.

    python -m bench.gpu.checks [--only gradient] [--device cpu --tiny]

Each check has a line of its own as soon as it is made. ``gradient``: the norm of a step's gradient
on the device by the same step on the CPU, in float32, without and with gradient checkpointing,
activations and optimizer in host memory, torch.compile and adapters; in bfloat16 within a few
percent. ``fp8``: the same bytes as on the CPU. ``offload``: what ``--share-gpus`` moves off the
device comes back bit by bit, and the memory is free in between. ``expandable``: CUDA IPC where
torch's own allocator has expandable segments. ``errors`` has what a check raised. The last line is
one JSON object; ``failed`` names the checks that did not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from typing import Any, Final

import numpy as np
import torch

from bench.gpu import common
from bench.gpu.learner import sample
from broker.weights import fp8
from broker.weights.memory.offload import OffloadedMemory
from learner.backends.torch import TorchBackend
from learner.config import AlgorithmSection, TrainSection
from rlearner_text.config import ModelSection

SHAPE: Final = common.ModelShape(256, 4, 4, 2, 64, 512, 2048, 2048)
LENGTHS: Final = (700, 300, 120)  # of the sequences of one step
OPTIONS: Final[Mapping[str, Mapping[str, Any]]] = {
    "plain": {}, "checkpointing": {"gradient_checkpointing": True}, "activations": {"activation_offload": True},
    "optimizer": {"optimizer_offload": True}, "adapters": {"lora": {"rank": 8}}, "compile": {"compile": True},
}  # fmt: skip
# relative; a GPU adds in another order, and the CPU's kernels are others
FLOAT32_ERROR: Final = 2e-3
BFLOAT16_ERROR: Final = 0.05
OFFLOADED_MIB: Final = {"cuda": 1024, "cpu": 16}  # the CPU's goes to a file
SPARE_BYTES: Final = 64 << 20  # for allocations between two readings
Check = Callable[[str], bool]


def main(arguments: list[str] | None = None) -> int:
    parser = common.parser(__doc__)
    parser.add_argument("--only", default="", metavar="CHECK", help="those whose names begin so")
    return common.run(_measure, parser, arguments)


def _measure(options: argparse.Namespace, device: str) -> int:
    with tempfile.TemporaryDirectory() as folder:
        checks: dict[str, bool] = {}
        errors: dict[str, str] = {}
        for name, check in _all_checks(folder, options.device).items():
            if not name.startswith(options.only):
                continue
            began = time.perf_counter()
            try:
                checks[name] = check(options.device)
            except Exception as error:  # noqa: BLE001 - the others are still worth running
                checks[name] = False
                errors[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            verdict = "holds" if checks[name] else f"FAILED {errors.get(name, '')}"
            print(f"{name}: {verdict} ({time.perf_counter() - began:.1f} s)", flush=True)
            common.show({"checks": checks, "errors": errors})
    counted = {"held": sum(checks.values()), "made": len(checks), "errors": errors}
    return common.finish("checks", device, SHAPE, counted, checks)


def _all_checks(folder: str, device: str) -> dict[str, Check]:
    """Return the checks by name, what may take longest last."""
    float32 = common.make_model(f"{folder}/float32", SHAPE, dtype="float32")
    names = [name for name in OPTIONS if name != "compile"]
    if device == "cuda" and find_spec("triton") is not None:
        names.append("compile")
    expected: dict[str, float] = {}
    gradients: dict[str, Check] = {
        f"gradient_{name}": partial(
            _same_gradient, float32, "float32", OPTIONS[name], FLOAT32_ERROR, expected
        )
        for name in names
    }
    rounded = partial(_same_gradient, float32, "bfloat16", {}, BFLOAT16_ERROR, expected)
    first = {
        "fp8": _same_fp8,
        "offload": _same_after_offload,
        "expandable": _reads_beside_expandable_segments,
    }
    return {**first, "gradient_bfloat16": rounded, **gradients}


def gradient_norm(model: str, dtype: str, device: str, options: Mapping[str, Any]) -> float:
    """Return the norm of the gradient of one step over three sequences."""
    train = TrainSection.model_validate(
        {"device": device, "lr": 1e-6, "micro_batch_tokens": 1024, "max_grad_norm": 1e9, **options}
    )
    settings = ModelSection.model_validate({"dtype": dtype})
    backend = TorchBackend(model, train=train, algorithm=AlgorithmSection(), model=settings, seed=0)
    try:
        rng = np.random.default_rng(0)
        cutter = backend.cutter()
        for length in LENGTHS:
            if (full := cutter.add(sample(length, SHAPE.vocab, rng))) is not None:
                backend.forward_backward(full)
        if rest := cutter.flush():
            backend.forward_backward(rest)
        return float(backend.step()["actor/grad_norm"])
    finally:
        backend.close()


def _same_gradient(
    model: str,
    dtype: str,
    options: Mapping[str, Any],
    limit: float,
    expected: dict[str, float],
    device: str,
) -> bool:
    kind = "adapters" if "lora" in options else "weights"
    if kind not in expected:
        adapters = {"lora": options["lora"]} if kind == "adapters" else {}
        expected[kind] = gradient_norm(model, "float32", "cpu", adapters)
    norm = gradient_norm(model, dtype, device, options)
    print(f"gradient norm {norm:.6g}, on the CPU {expected[kind]:.6g}", flush=True)
    return abs(norm - expected[kind]) <= limit * expected[kind] and expected[kind] > 0


def _same_fp8(device: str) -> bool:
    torch.manual_seed(0)
    weight = torch.randn(3, 384, 640, dtype=torch.bfloat16)
    quantised = [_quantise(weight.to(place)) for place in ("cpu", device)]
    return all(torch.equal(here.cpu(), there.cpu()) for here, there in zip(*quantised, strict=True))


def _quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bytes of the quantized weights, and their scales."""
    target = torch.empty(weight.shape, dtype=fp8.FLOAT8, device=weight.device)
    scales = torch.empty(fp8.scale_shape(weight.shape), device=weight.device)
    for _ in fp8.quantise(weight, target, scales):
        pass
    return target.view(torch.uint8), scales


def _same_after_offload(device: str) -> bool:
    torch.manual_seed(0)
    # a quarter each
    tensors = [torch.randn(OFFLOADED_MIB[device] << 16, device=device) for _ in range(4)]
    tensors.append(tensors[0][1000:2000])  # shares the first one's memory
    copies = [tensor.cpu().clone() for tensor in tensors]
    memory = OffloadedMemory()
    for _ in range(2):  # the second time with the host memory of the first
        free = _free_bytes(device)
        released = memory.release(tensors)
        gained = _free_bytes(device) - free
        memory.restore()
        if device == "cuda" and gained < released - SPARE_BYTES:
            print(f"of {released} bytes {gained} were freed", flush=True)
            return False
    return all(
        torch.equal(tensor.cpu(), copy) for tensor, copy in zip(tensors, copies, strict=True)
    )


def _free_bytes(device: str) -> int:
    return torch.cuda.mem_get_info()[0] if device == "cuda" else 0


def _reads_beside_expandable_segments(device: str) -> bool:
    command = [
        sys.executable,
        "-m",
        "bench.gpu.ipc",
        "--device",
        device,
        "--tiny",
        "--repeats",
        "1",
    ]
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=90
    )
    try:
        failed = json.loads(done.stdout.splitlines()[-1])["failed"]
    except (IndexError, ValueError):
        lines = (done.stdout + done.stderr).strip().splitlines()
        raise RuntimeError(lines[-1] if lines else f"exit code {done.returncode}") from None
    if failed:
        raise RuntimeError(f"bench.gpu.ipc: failed checks: {', '.join(failed)}")
    return True


if __name__ == "__main__":
    sys.exit(main())
