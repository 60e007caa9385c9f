"""Run ``rlearner up`` on a random Qwen of half a billion parameters: broker, learner, rollout
server, hubs.

The generated model has a vocabulary of single characters, so it learns little in so few steps; the
run shows that every part works on the GPU, how long a step takes, and that the audit finds each
ticket in exactly one final state. With the engine hf, bench.gpu.ipc runs first and its line is part
of this one; ``--weights ipc`` makes the run use it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from bench.gpu import common
from broker.errors import UserError
from broker.system.gpus import existing
from rlearner_text.config import TinyModel
from rlearner_text.tiny import CHARACTERS

SPECIAL_TOKENS: Final = 6  # of the vocabulary of characters, see rlearner_text.tiny


def main(arguments: list[str] | None = None) -> int:
    made = common.parser(__doc__)
    common.engine_options(made)
    made.add_argument("--steps", type=int, default=None, help="optimizer steps (20, or 2)")
    channels = ["shared", "gloo", "nccl", "ipc", "curve"]
    made.add_argument(
        "--weights", choices=channels, help="train.weights_backend (what fits the GPUs)"
    )
    made.add_argument("--timeout-s", type=float, default=3000.0)
    made.add_argument(
        "overrides", nargs="*", metavar="key=value", help="further settings of the run"
    )
    return common.run(_measure, made, arguments)


def settings(options: argparse.Namespace, folder: str) -> list[str]:
    """Return the overrides of configs/quickstart.yaml."""
    shape = shape_of(options)
    tiny = TinyModel(
        hidden_size=shape.hidden, num_layers=shape.layers, num_heads=shape.heads, num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim, intermediate_size=shape.intermediate,
    )  # fmt: skip
    steps = options.steps or (2 if options.tiny else 20)
    found = {
        "run.name": "bench", "run.dir": folder, "model.tiny": tiny.model_dump(mode="json"),
        "model.dtype": "float32" if options.tiny else "bfloat16", "train.steps": steps, "train.device": options.device,
        "train.lr": 1e-5, "train.groups_per_step": 4 if options.tiny else 32,
        "train.num_threads": 1 if options.tiny else 0, "train.micro_batch_tokens": 2048 if options.tiny else 32768,
        "warm_start.steps": 2 if options.tiny else 50, "warm_start.episodes": 64, "warm_start.lr": 1e-4,
        "eval.every_steps": 0, "checkpoint.every_steps": steps, "samples.keep": True, "rollout.engine": options.engine,
        "rollout.engine_args": options.engine_args, "rollout.num_threads": 1 if options.tiny else 0,
        "envhub.n": 32 if options.tiny else 512, "rollout.max_running": 32 if options.tiny else 512,
    }  # fmt: skip
    if options.weights is not None:
        found["train.weights_backend"] = options.weights
    elif options.device == "cuda" and (options.engine in ("vllm", "sglang") or len(existing()) < 2):
        # NCCL takes no two members on one GPU, and none in host memory
        found["train.weights_backend"] = "shared"
    return [f"{key}={json.dumps(value)}" for key, value in found.items()] + list(options.overrides)


def shape_of(options: argparse.Namespace) -> common.ModelShape:
    """Return the shape of the model of the run: the same blocks with a vocabulary of characters."""
    given = common.TINY if options.tiny else common.HALF_BILLION
    positions = TinyModel().max_position_embeddings
    return common.ModelShape(
        **{**vars(given), "vocab": SPECIAL_TOKENS + len(CHARACTERS), "positions": positions}
    )


def _measure(options: argparse.Namespace, device: str) -> int:
    environment = (
        {**os.environ, "CUDA_VISIBLE_DEVICES": ""} if options.device == "cpu" else dict(os.environ)
    )
    ipc = _ipc(options, environment) if options.engine == "hf" else None
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "rlearner.cli",
            "up",
            "configs/quickstart.yaml",
            *settings(options, folder),
        ]
        try:
            done = subprocess.run(
                command,
                env=environment,
                timeout=options.timeout_s,
                check=False,
                stderr=subprocess.PIPE,
                text=True,
            )
        except subprocess.TimeoutExpired:
            raise UserError(
                f"the run did not end within --timeout-s={options.timeout_s:g}"
            ) from None
        if done.returncode == 2:
            raise UserError(done.stderr.strip().splitlines()[-1].removeprefix("error: "))
        command = [sys.executable, "-m", "rlearner.cli", "audit", f"{folder}/bench", "--json"]
        audit = subprocess.run(command, capture_output=True, text=True, check=False)
        file = Path(folder) / "bench" / "metrics.jsonl"
        lines = (
            [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
        )
        made = _made(Path(folder) / "bench" / "model")
    steps = options.steps or (2 if options.tiny else 20)
    checks: dict[str, Any] = {
        "exit_code_0": done.returncode == 0,
        "every_step_was_made": len(lines) == steps,
    }
    checks |= {"audit": audit.returncode == 0}
    shape = shape_of(options)
    if made is not None:
        checks["model_is_of_that_size"] = made == sum(common.num_parameters(shape))
    if ipc is not None:
        checks["ipc"] = not ipc["failed"]
    if options.weights == "ipc":
        checks["weights_were_read_on_the_gpu"] = (
            bool(lines) and lines[-1].get("weights/shared", 0) >= 1
        )
    found = {"engine": options.engine, "weights": options.weights, "steps": len(lines), "ipc": ipc}
    return common.finish("run", device, shape, found | figures(lines), checks)


def _ipc(options: argparse.Namespace, environment: dict[str, str]) -> dict[str, Any]:
    """The line of bench.gpu.ipc on this machine; of one that ended without a line the last thing
    that it said.
    """
    command = [
        sys.executable,
        "-m",
        "bench.gpu.ipc",
        "--device",
        options.device,
        *(["--tiny"] if options.tiny else []),
    ]
    try:
        done = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=options.timeout_s,
        )
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return {"failed": [f"it did not end within --timeout-s={options.timeout_s:g}"]}
    except (IndexError, ValueError):
        return {
            "failed": ((done.stderr or done.stdout).strip().splitlines() or ["it said nothing"])[
                -1:
            ]
        }
    return {
        name: value for name, value in found.items() if name not in ("bench", "device", "model")
    }


def figures(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the steps, the first left out where there are others, for it waits for
    everything to start.
    """
    lines = lines[1:] if len(lines) > 1 else lines
    names = ["perf/tokens_per_s", "time/train", "time/wait_for_batch", "time/broadcast_weights"]
    names += ["trainer/idle_ratio", "reward/mean"]
    found = {
        name: [float(line[name]) for line in lines if isinstance(line.get(name), int | float)]
        for name in names
    }
    return {
        name: round(statistics.median(values), 5) if values else None
        for name, values in found.items()
    }


def _made(folder: Path) -> int | None:
    """Return the parameters of the model that the run made, or None."""
    from safetensors import safe_open

    total = 0
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - no mapping
                size = 1
                for length in tensors.get_slice(name).get_shape():
                    size *= length
                total += size
    return total or None


if __name__ == "__main__":
    sys.exit(main())
