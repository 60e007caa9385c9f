"""Run engine hf on every model family on a GPU, against plain transformers on the CPU.

Every family is a small random model, as in ``python -m bench.families``, each in a process of its
own. With --device cpu --tiny two of them run.

exact: families whose logprobs are those of transformers; graphs: those of them that decode from
CUDA graphs; eager: the others, with the reason; refused: families that the engine says it cannot
run; wrong: families that it should run, or should refuse and does not.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from bench.gpu import common

WORKERS: Final = 8
FEW: Final = ("llama", "qwen3")
POOL: Final = "--pool"  # runs the families; its parent has used the device, so it cannot fork


def main(arguments: list[str] | None = None) -> int:
    words = sys.argv[1:] if arguments is None else arguments
    if POOL in words:
        device, dtype, *names = [word for word in words if word != POOL]
        return _run_pool(device, dtype, names)
    made = common.parser(__doc__)
    made.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    made.add_argument("families", nargs="*", metavar="FAMILY", help="rows to run, all by default")
    return common.run(_measure, made, words)


def _measure(options: argparse.Namespace, device: str) -> int:
    names = options.families or (FEW if options.tiny else ())
    command = [sys.executable, "-m", "bench.gpu.families", POOL, options.device]
    command += [options.dtype, *names]
    lines = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as pool:
        assert pool.stdout is not None
        for line in pool.stdout:
            lines.append(json.loads(line))
            common.show(_figures(lines))
    checks = {"pool_ended": pool.returncode == 0, "families_ran": bool(lines)}
    figures = _figures(lines)
    checks["as_transformers"] = not figures["wrong"]
    figures["dtype"] = options.dtype
    return common.finish("families", device, common.TINY, figures, checks)


def _figures(lines: list[dict[str, Any]]) -> dict[str, Any]:
    exact = [line for line in lines if line["outcome"] == "works"]
    return {
        "families": len(lines),
        "exact": len(exact),
        "graphs": sum(line["graphs"] for line in exact),
        "eager": {line["family"]: line["eager"] for line in exact if not line["graphs"]},
        "refused": [line["family"] for line in lines if line["outcome"] == "refused"],
        "wrong": {line["family"]: line["problem"] for line in lines if line["is_wrong"]},
    }


def _run_pool(device: str, dtype: str, names: list[str]) -> int:
    os.environ["OMP_NUM_THREADS"] = "1"  # a child of a fork has no other threads
    import torch
    from transformers.utils import logging as transformers_logging

    from bench.families.pool import Job, run_jobs
    from bench.families.table import ARCHITECTURES
    from rlearner_text.families import WORKS, read_matrix

    torch.set_num_threads(1)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    works = {family.name for family in read_matrix().families if family.cells["engine"] == WORKS}
    with tempfile.TemporaryDirectory() as folder:
        jobs = [
            Job((each, device, dtype, Path(folder) / each.name), ["engine"])
            for each in ARCHITECTURES
            if not names or each.name in names
        ]
        for answer in run_jobs(jobs, _run_family, _crash, WORKERS):
            expected = "works" if answer["family"] in works else "refused"
            answer["is_wrong"] = answer["outcome"] != expected
            print(json.dumps(answer), flush=True)
    return 0


def _run_family(job: Any, cell: str) -> dict[str, Any]:
    from bench.families.architectures import build
    from bench.families.engine_cells import run_engine
    from bench.families.scene import Scene
    from bench.families.verdicts import reason_of

    architecture, device, dtype, folder = job.subject
    reasons = _Reasons()
    logging.getLogger("rollout").addHandler(reasons)
    logging.getLogger("rollout").setLevel(logging.INFO)
    build(architecture, folder / "model", dtype)
    scene = Scene(folder / "model", dtype, device)
    outcome, problem = "works", ""
    try:
        run_engine(scene)
    except Exception as error:  # noqa: BLE001 - it is the verdict
        outcome, problem = reason_of(error, scene)
    return {
        "cell": cell, "family": architecture.name, "outcome": outcome, "problem": problem,
        "eager": reasons.text, "graphs": device == "cuda" and not reasons.text,
    }  # fmt: skip


def _crash(job: Any, cell: str, reason: str) -> dict[str, Any]:
    return {
        "cell": cell, "family": job.subject[0].name, "outcome": "broken", "problem": reason,
        "eager": "", "graphs": False,
    }  # fmt: skip


class _Reasons(logging.Handler):
    """Keeps why the engine decodes without CUDA graphs."""

    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if "without CUDA graphs" in message:
            self.text = message.partition(": ")[2]


if __name__ == "__main__":
    sys.exit(main())
