"""Run the quickstart on the GPU: success before and after, and its audit.

    python -m bench.gpu.quickstart [--by-hand] [--device cpu --tiny]

``--by-hand`` starts each process with its own command: ``rlearner start CONFIG --gpus 0`` next to
``rollout-server --gpus 1``, with a broker, an environment hub and a reward hub; else ``rlearner
up`` starts them on the first GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final

from bench.gpu import common
from bench.support.fleet import free_port
from broker.errors import UserError
from broker.system.children import spawn

RUN: Final = "gpu"
END_S: Final = 20.0


def main(arguments: list[str] | None = None) -> int:
    made = common.parser(__doc__)
    made.add_argument(
        "--by-hand",
        action="store_true",
        help="each process by its own command, server on the next GPU",
    )
    made.add_argument("--steps", type=int, default=None, help="optimizer steps (40, or 2)")
    return common.run(_measure, made, arguments)


def settings(options: argparse.Namespace, folder: str) -> list[str]:
    """Return the overrides of configs/quickstart.yaml."""
    steps = options.steps or (2 if options.tiny else 40)
    found = {
        "run.name": RUN,
        "run.dir": folder,
        "train.steps": steps,
        "train.device": options.device,
    }
    found |= {"checkpoint.every_steps": steps, "eval.every_steps": steps, "eval.baseline": ""}
    if options.tiny:
        found |= {
            "warm_start.steps": 2,
            "warm_start.episodes": 16,
            "eval.tasks": 8,
            "train.groups_per_step": 4,
        }
    return [f"{key}={json.dumps(value)}" for key, value in found.items()]


def commands(options: argparse.Namespace, folder: str) -> list[list[str]]:
    """Return the processes of a run by hand, the learner last."""
    gpus = ("cpu", "cpu") if options.device == "cpu" else ("0", "1")
    learner = [
        "rlearner.cli",
        "start",
        "configs/quickstart.yaml",
        *settings(options, folder),
        "--gpus",
        gpus[0],
    ]
    others = [["envhub.cli", "--n", "256"], ["rewardhub.cli"], ["rollout.cli", "--gpus", gpus[1]]]
    return [*([*one, "--run", RUN] for one in others), learner]


def _measure(options: argparse.Namespace, device: str) -> int:
    environment = dict(os.environ) | (
        {"CUDA_VISIBLE_DEVICES": ""} if options.device == "cpu" else {}
    )
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        code = (_by_hand if options.by_hand else _up)(options, folder, environment)
        seconds = time.monotonic() - began
        words = [sys.executable, "-m", "rlearner.cli", "audit", f"{folder}/{RUN}", "--json"]
        audit = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
        file = Path(folder, RUN, "metrics.jsonl")
        lines = (
            [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
        )
    found = successes(lines)
    checks = {
        "exit_code_0": code == 0,
        "audit": audit.returncode == 0,
        "evaluated_before_and_after": len(found) >= 2,
    }
    figures = {"success_before": found[0], "success_after": found[-1]} if found else {}
    line = {
        "bench": "bench.gpu.quickstart",
        "device": device,
        "by_hand": options.by_hand,
        **figures,
    }
    failed = [name for name, held in checks.items() if not held]
    print(
        json.dumps(
            line | {"seconds": round(seconds, 1), "audit": audit.returncode == 0, "failed": failed}
        )
    )
    return 1 if failed else 0


def successes(lines: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return the held-out success of each evaluation, by its step."""
    found = {
        line["eval/step"]: line["eval/success_rate"]
        for line in lines
        if "eval/success_rate" in line
    }
    return [float(found[step]) for step in sorted(found)]


def _up(options: argparse.Namespace, folder: str, environment: Mapping[str, str]) -> int:
    words = ["-m", "rlearner.cli", "up", "configs/quickstart.yaml", *settings(options, folder)]
    with _child([sys.executable, *words], sys.stdout.buffer, environment) as child:
        return child.wait()


def _by_hand(options: argparse.Namespace, folder: str, environment: Mapping[str, str]) -> int:
    port = free_port()
    named = {**environment, "RL_BROKER": f"nats://127.0.0.1:{port}", "RL_RUN": ""}
    broker = ["broker.cli", "serve", "--store", f"{folder}/broker", "--port", str(port)]
    return _nested([broker, *commands(options, folder)], named)


def _nested(words: Sequence[Sequence[str]], environment: Mapping[str, str]) -> int:
    """Run the last command while the others run; return its exit code."""
    first, *rest = words
    with _child([sys.executable, "-m", *first], sys.stdout.buffer, environment) as child:
        if not rest:
            return child.wait()
        code = _nested(rest, environment)
        if child.poll() not in (None, 0):
            raise UserError(f"{first[0]} ended with exit code {child.returncode}")
        return code


@contextmanager
def _child(
    words: Sequence[str], output: IO[bytes], environment: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    child = spawn(words, output, env=environment)
    try:
        yield child
    finally:
        child.send_signal(signal.SIGTERM)
        try:
            child.wait(END_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


if __name__ == "__main__":
    sys.exit(main())
