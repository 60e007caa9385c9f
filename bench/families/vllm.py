"""Fill the column of vLLM: ``make families-vllm``, or ``.venv-vllm/bin/python -m
bench.families.vllm [FAMILY ...]``.

Each family is a small random model in float32, served by the engine vllm with the real build for
the CPU: prompts of several lengths at a time, then other weights by the learner's names, and
prompts again. Each answer's logprobs are compared with plain transformers. That build lacks some
kernels of the builds for GPUs, so the column says what works, and nothing is refused by it. A
family whose logprobs differ ends the command with 1. The last line is one JSON object.

``--write`` adds the column to rlearner_text/families.json and docs/models.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from torch import Tensor

from bench.families import docs
from bench.families.architectures import Architecture, build
from bench.families.engine_cells import compare, request
from bench.families.reference import DifferenceError, PlainModel, sample_tokens
from bench.families.table import ARCHITECTURES
from broker.weights.probe import make_probe
from rlearner_text import families
from rlearner_text.families import WORKS, Matrix
from rollout.config import RolloutSection
from rollout.engines.base import EngineConfig

COLUMN: Final = "vllm"
CONTEXT: Final = 128
PROMPTS: Final = (5, 47, 23, 90)  # tokens: shorter than any window, and longer than any
ANSWER: Final = 16
CPU_S: Final = 300  # processor time of a family, so that a busy machine changes no verdict
FAMILY_S: Final = 3600.0  # for a vLLM that waits for ever
# Attention on the CPU takes heads of 32 and more.
WIDE: Final = {"hidden_size": 128, "head_dim": 32}
_LARGER: Final[Mapping[str, int]] = {"global_head_dim": 32, "word_embed_proj_dim": 128, "linear_key_head_dim": 32,
                                     "linear_value_head_dim": 32}  # fmt: skip


def widen(architecture: Architecture) -> Architecture:
    """Return a family with the settings that belong to heads of 32."""
    parts = {name: _widen(values) for name, values in architecture.parts.items()}
    return replace(architecture, settings=_widen(architecture.settings), parts=parts)


def _widen(settings: Mapping[str, Any]) -> dict[str, Any]:
    wide = {name: _LARGER.get(name, value) for name, value in settings.items()}
    rope = wide.get("rope_parameters") or {}
    if "long_factor" in rope:  # one factor for two elements of a head
        factors = {name: [*rope[name], *rope[name]] for name in ("short_factor", "long_factor")}
        wide["rope_parameters"] = {**rope, **factors}
    return wide


async def compare_family(folder: Path) -> float:
    """Serve a model, load other weights, and return the largest difference of a logprob.

    Raises:
        DifferenceError: if an answer's logprobs are not those of transformers.
        UserError: if vLLM does not run the model.
    """
    from rollout.engines.vllm.engine import VLLMEngine

    sizes = {
        "max_running": 4,
        "max_context_tokens": CONTEXT,
        "num_threads": 1,
        "prefill_tokens": CONTEXT,
    }
    section = RolloutSection.model_validate(
        {"engine": "vllm", "engine_args": {"kv_cache_gib": 0.2}, **sizes}
    )
    engine = VLLMEngine(EngineConfig(str(folder), section, device="cpu", policy_version=0))
    plain = PlainModel(folder, "float32", CONTEXT)
    await engine.start()
    try:
        worst = await _answers(engine, plain, "first")
        weights = {name: _other(name, tensor) for name, tensor in engine.weights().items()}
        missing = plain.module.load_state_dict(weights, strict=False).unexpected_keys
        if missing:
            raise DifferenceError(f"{missing[0]} is no weight of transformers")
        tokens = sample_tokens(CONTEXT - 1, seed=7)
        probe = make_probe(tokens, plain.logprobs(tokens).numpy(), tolerance=5e-3)
        await engine.update_weights(weights, 1, "recompute", probe)
        return max(worst, await _answers(engine, plain, "second"))
    finally:
        await engine.close()


async def _answers(engine: Any, plain: PlainModel, name: str) -> float:
    prompts = {f"{name}-{length}": sample_tokens(length, length) for length in PROMPTS}
    requests = (request(key, prompt, ANSWER, seed=len(prompt)) for key, prompt in prompts.items())
    outputs = await asyncio.gather(*(engine.generate(each) for each in requests))
    return max(
        compare(plain, key, prompts[key], output)
        for key, output in zip(prompts, outputs, strict=True)
    )


def _other(name: str, tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point() or tensor.dim() < 2:
        return tensor.clone()
    random = torch.Generator().manual_seed(len(name))
    return tensor + 0.02 * torch.randn(tensor.shape, generator=random)


def run_child(name: str) -> int:
    """Run one family in this process and print its state as the last line."""
    torch.set_num_threads(1)
    (architecture,) = (each for each in ARCHITECTURES if each.name == name)
    with tempfile.TemporaryDirectory(prefix="families.") as work:
        folder = Path(work) / "model"
        state = WORKS
        difference = 0.0
        try:
            build(widen(architecture), folder, sizes=WIDE)
            difference = asyncio.run(compare_family(folder))
        except DifferenceError as error:
            state = f"wrong: {error}"
        except Exception as error:  # noqa: BLE001 - it is the verdict
            state = (
                " ".join(str(error).split()).replace(str(folder), "the model")[:200]
                or type(error).__name__
            )
    print(json.dumps({"state": state, "difference": difference}), flush=True)
    os._exit(0)  # threads of vLLM may hang at exit


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))


def run_family(name: str) -> dict[str, Any]:
    """Run one family in a process of its own, since a vLLM may abort it."""
    command = [sys.executable, "-m", "bench.families.vllm", "--child", name]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=FAMILY_S,
            preexec_fn=_limit,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"state": f"vLLM gave no answer in {FAMILY_S:.0f} s", "difference": 0.0}
    lines = done.stdout.splitlines()
    if not lines or not lines[-1].startswith('{"state"'):
        return {"state": f"vLLM ended with exit code {done.returncode}", "difference": 0.0}
    answer: dict[str, Any] = json.loads(lines[-1])
    return answer


def add_column(states: Mapping[str, str]) -> None:
    """Write the states of families into the matrix and the document."""
    matrix = families.read_matrix()
    rows = [
        msgspec.structs.replace(row, cells={**row.cells, COLUMN: states[row.name]})
        if row.name in states
        else row
        for row in matrix.families
    ]
    text = msgspec.json.format(msgspec.json.encode(Matrix(matrix.transformers, rows)), indent=1)
    families.FILE.write_bytes(text + b"\n")
    families.read_matrix.cache_clear()
    docs.write()


def main(arguments: list[str] | None = None) -> int:
    """Run, report, and return 1 if a family's logprobs differ."""
    parser = argparse.ArgumentParser(prog="python -m bench.families.vllm", description=__doc__)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="rows to run, all by default")
    parser.add_argument(
        "--write", action="store_true", help="add the column to families.json and docs/models.md"
    )
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        return run_child(options.families[0])
    known = [each.name for each in ARCHITECTURES]
    if unknown := set(options.families) - set(known):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(known)}")
    began = time.monotonic()
    states = dict[str, str]()
    for name in options.families or known:
        answer = run_family(name)
        states[name] = answer["state"]
        print(f"{name:24} {answer['difference']:.1g}  {answer['state']}", flush=True)
    if options.write:
        add_column(states)
    wrong = sorted(name for name, state in states.items() if state.startswith("wrong"))
    works = sum(state == WORKS for state in states.values())
    figures = {"rows": len(states), "works": works, "wrong": len(wrong), "wrong_names": wrong}
    print(json.dumps({**figures, "minutes": round((time.monotonic() - began) / 60, 2)}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
