"""Compare rlearner with TRL's GRPOTrainer on the same work, interleaved, on two cores.

    make peers-env
    python -m bench.peers [--pairs 5] [--cases equal,skewed,skewed_4,vllm]

Equal on both sides: model (0.6 million parameters, fp32), tokenizer, prompts, chat template,
reward, sampling, cut of answers, 128 samples per step in groups of 8, one optimizer step per batch,
GRPO's loss with the same clipping, AdamW with the same learning rate, and two threads that compute:
TRL runs torch on two, ours has a learner and a server with one each, with the hubs and the broker
on the same two cores. Not equal: TRL is synchronous and on-policy; ours trains on samples that are
up to ``max_staleness`` versions old (1, or 4 in ``skewed_4``), with the logprobs of the server.

Lengths (``bench.peers.workload``): ``equal`` cuts answers at 64 tokens, ``skewed`` at 400. TRL
generates one padded batch (``--trl-mode static``) or by transformers' continuous batching; ``auto``
tries both in the warm-up of each case and keeps the faster. Ours is ``rlearner up`` from its start,
measured after three steps that fill the pipeline.

``ratio_*``: samples per second of ours / of TRL, the median over the pairs, in alternating order.
``vllm`` runs both on vLLM for CPUs, in the environment of ``make vllm-env`` (``--vllm-python``);
null with the reason in ``why_no_vllm`` if either side cannot. ``samples_per_s_*`` and ``length_*``
have ours first; ``idle_*`` has the shares of time in which our learner and our server were idle.
Cases with the same answers share TRL's turns. On a quiet machine it takes a minute and a half per
pair, and two more minutes. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from bench.peers.sides import PACKAGES, PYTHON, ROOT, Measured, Trl, ours
from bench.peers.workload import CASES, Case, make
from broker.settings.arguments import count

MODES: Final = ("static", "continuous")
MISSING: Final = "TRL is not installed; run make peers-env"


def trl_of(python: str, folder: Path, case: Case, mode: str) -> Trl:
    """Start TRL in the mode asked for, warmed up; ``auto`` in the faster one."""
    if case.engine == "vllm":
        modes: tuple[str, ...] = ("vllm",)
    else:
        modes = MODES if mode == "auto" else (mode,)
    sides: dict[str, tuple[float, Trl]] = {}
    for one in modes:
        side = Trl(python, folder, case, one)
        try:
            side.turn(1)
            sides[one] = side.turn(1).rate if len(modes) > 1 else 0.0, side
        except (RuntimeError, KeyboardInterrupt):
            side.close()
            raise
    best = max(sides, key=lambda name: sides[name][0])
    for name, (rate, side) in sides.items():
        if len(modes) > 1:
            print(f"{case.name}  TRL {name}: {rate:.1f} samples/s in the warm-up", flush=True)
        if name != best:
            side.close()
    return sides[best][1]


def show(name: str, side: str, one: Measured) -> None:
    idle = "".join(f"  {key} {value:.2f}" for key, value in one.idle.items())
    print(
        f"{name}  {side}  {one.rate:.1f} samples/s  mean length {one.length:.1f}  trained {one.trained}{idle}",
        flush=True,
    )


def compare(
    cases: Sequence[Case], folder: Path, python: str, options: argparse.Namespace
) -> dict[str, Any]:
    """Return the figures of cases that differ in nothing that TRL knows.

    Raises:
        RuntimeError: if a side cannot run them.
    """
    theirs: list[Measured] = []
    mine: dict[str, list[Measured]] = {case.name: [] for case in cases}
    trl = trl_of(python, folder, cases[0], options.trl_mode)
    try:
        for turn in range(options.pairs):
            sides: list[Case | None] = [*cases, None]
            for case in sides if turn % 2 == 0 else sides[::-1]:
                found = ours(python, folder, case, turn) if case else trl.turn(cases[0].trl_steps)
                (mine[case.name] if case else theirs).append(found)
                show(case.name if case else cases[0].name, "rlearner" if case else "TRL", found)
    finally:
        trl.close()
    if not all(one.trained for one in [*theirs, *itertools.chain(*mine.values())]):
        raise SystemExit(f"{cases[0].name}: a side did not train; the comparison is void")
    figures: dict[str, Any] = {}
    for name, runs in mine.items():
        ratios = [ours.rate / trl.rate for ours, trl in zip(runs, theirs, strict=True)]
        print(f"{name}  ratios {', '.join(f'{ratio:.2f}' for ratio in ratios)}", flush=True)
        idle = [statistics.median(one.idle[key] for one in runs) for key in ("learner", "server")]
        figures |= {
            f"ratio_{name}": round(statistics.median(ratios), 3),
            f"samples_per_s_{name}": [
                round(statistics.median(one.rate for one in side), 1) for side in (runs, theirs)
            ],
            f"length_{name}": [
                round(statistics.mean(one.length for one in side), 1) for side in (runs, theirs)
            ],
            f"idle_{name}": [round(share, 2) for share in idle],
        }
    return figures


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.peers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--pairs", type=count, default=5)
    add("--cases", default=",".join(case.name for case in CASES), help="of %(default)s")
    add("--trl-mode", choices=("auto", *MODES), default="auto")
    add("--vllm-python", default=str(ROOT / ".venv-vllm" / "bin" / "python"), metavar="PATH")
    options = parser.parse_args(argv)
    names = [case.name for case in CASES]
    chosen = options.cases.split(",")
    if unknown := sorted(set(chosen) - set(names)):
        parser.error(f"--cases: {unknown[0]!r} is not one of {', '.join(names)}")
    if not (PACKAGES / "trl").is_dir() and find_spec("trl") is None:
        parser.error(MISSING)
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="rlearner-peers-") as name:
        folder = Path(name)
        make(folder)
        wanted = [case for case in CASES if case.name in chosen]
        for (engine, _), alike in itertools.groupby(
            wanted, key=lambda case: (case.engine, case.max_tokens)
        ):
            python = options.vllm_python if engine == "vllm" else PYTHON
            try:
                if not os.access(python, os.X_OK):
                    raise RuntimeError(f"no {python}; run make vllm-env")
                figures |= compare(list(alike), folder, python, options)
            except RuntimeError as error:
                if engine != "vllm":
                    raise
                figures |= {"ratio_vllm": None, "why_no_vllm": str(error)}
    print(json.dumps({**figures, "pairs": options.pairs, "load": round(os.getloadavg()[0], 1)}))


if __name__ == "__main__":
    main()
