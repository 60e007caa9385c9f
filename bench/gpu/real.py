"""Train a pretrained model on generated additions: held-out success before and after, and the time
of a step.

    python -m bench.gpu.real [--model FILE.gguf | FOLDER] [--steps 60] [--device cpu --tiny]

The model is models/*.gguf by default, as a bundle with a model leaves it, converted first (package
``gguf``). New weights travel through the GPU's memory (``train.weights_backend=ipc``). ``--tiny``
trains a generated model for two steps, which shows only that it runs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from bench.gpu import common
from bench.gpu.quickstart import successes
from bench.gpu.steps import GGUF
from broker.errors import UserError

RUN: Final = "real"


def main(arguments: list[str] | None = None) -> int:
    parser = common.parser(__doc__)
    parser.add_argument(
        "--model", type=Path, metavar="PATH", help=f"GGUF file or folder of a model ({GGUF})"
    )
    parser.add_argument("--steps", type=int, default=None, help="optimizer steps (60, or 2)")
    return common.run(_measure, parser, arguments)


def settings(options: argparse.Namespace, model: Path | None, folder: str) -> list[str]:
    """Return the overrides of configs/arithmetic.yaml."""
    steps = options.steps or (2 if options.tiny else 60)
    values: dict[str, Any] = {
        "run.name": RUN,
        "run.dir": folder,
        "train.steps": steps,
        "train.device": options.device,
    }
    values |= {"eval.every_steps": steps, "checkpoint.every_steps": steps}
    if model is not None:
        values["model.path"] = str(model)
    if options.device == "cuda":
        values |= {"train.weights_backend": "ipc", "rollout.num_threads": 0, "train.num_threads": 0}
    if options.tiny:
        values |= {
            "eval.tasks": 8,
            "train.groups_per_step": 2,
            "train.warmup_steps": 0,
            "model.dtype": "float32",
        }
    return [f"{key}={json.dumps(value)}" for key, value in values.items()]


def _measure(options: argparse.Namespace, device: str) -> int:
    with tempfile.TemporaryDirectory() as folder:
        model = (
            None
            if options.tiny and options.model is None
            else _model_folder(options.model, Path(folder))
        )
        began = time.monotonic()
        words = ["up", "configs/arithmetic.yaml", *settings(options, model, folder)]
        code = subprocess.run(
            [sys.executable, "-m", "rlearner.cli", *words], check=False
        ).returncode
        seconds = time.monotonic() - began
        audit = [sys.executable, "-m", "rlearner.cli", "audit", f"{folder}/{RUN}", "--json"]
        audited = subprocess.run(audit, capture_output=True, check=False).returncode == 0
        metrics = Path(folder, RUN, "metrics.jsonl")
        lines = (
            [json.loads(line) for line in metrics.read_text().splitlines()]
            if metrics.is_file()
            else []
        )
    rates = successes(lines)
    figures: dict[str, Any] = {
        "seconds": round(seconds, 1),
        "step_s": step_seconds(lines),
        "audit": audited,
    }
    figures |= {"success_before": rates[0], "success_after": rates[-1]} if rates else {}
    checks = {
        "exit_code_0": code == 0,
        "audit": audited,
        "evaluated_before_and_after": len(rates) >= 2,
    }
    if not options.tiny:
        checks["it_learned"] = len(rates) >= 2 and rates[-1] > rates[0] + 0.1
    failed = [name for name, is_met in checks.items() if not is_met]
    print(
        json.dumps(
            {
                "bench": "bench.gpu.real",
                "device": device,
                **figures,
                "checks": checks,
                "failed": failed,
            }
        )
    )
    return 1 if failed else 0


def step_seconds(lines: list[dict[str, Any]]) -> float | None:
    """Return the median time between two steps of a run's metrics, in seconds."""
    times = [float(line["time"]) for line in lines if "step" in line and "time" in line]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    return round(statistics.median(gaps), 3) if gaps else None


def _model_folder(path: Path | None, folder: Path) -> Path:
    """Return the folder of a model, converted from a GGUF file if it is one."""
    if path is None:
        path = next(iter(sorted(Path().glob(GGUF))), None)
    if path is None or not path.exists():
        raise UserError(f"--model: there is no {path or GGUF}")
    if path.is_dir():
        return path
    if find_spec("gguf") is None:
        raise UserError(f"{path}: reading it needs the package gguf")
    from bench.support.gguf_folder import convert

    convert(path, folder / "model")
    return folder / "model"


if __name__ == "__main__":
    sys.exit(main())
