"""Run everything that this machine's GPUs allow, what says most first, within --minutes.

    python -m bench.gpu [--minutes 8] [--only weights] [--again] [--out FILE] [--docs PAGE]
    python -m bench.gpu --cpu          # the same steps, small, without a GPU: shows that they run

Each step is a process with a time limit; one that fails does not stop the others, and one for which
no time is left is left out. The outcomes are kept in a file (``bench-gpu.json``), so an interrupted
call goes on where it was. At the end the table of docs/gpu.md is written, and one line of JSON is
printed. Exit code 0: nothing failed. 1: something did; the line names it. 2: no GPU, or one that
cannot be used, or bad input.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, Literal

from bench.gpu.common import MODELS
from bench.gpu.runner import run_steps
from bench.gpu.state import State, read_state
from bench.gpu.steps import STEPS, Machine, Step, chosen
from bench.gpu.table import last_line, write_table
from broker.errors import UserError
from broker.settings.arguments import positive
from rlearner.doctor.hardware import find_gpus, find_torch, gpu_obstacle

PAGE: Final = Path(__file__).resolve().parents[2] / "docs" / "gpu.md"  # there in a clone only


def main(arguments: Sequence[str] | None = None, steps: Sequence[Step] = STEPS) -> int:
    """Run the steps; return the exit code.

    Args:
        steps: in their order; the first must report ``devices``.
    """
    options = _parser().parse_args(arguments)
    try:
        return _run(options, steps)
    except (UserError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _run(options: argparse.Namespace, steps: Sequence[Step]) -> int:
    wanted = chosen(options.only, steps)
    if not options.cpu and (obstacle := _obstacle(options.busy)):
        raise UserError(obstacle)
    if not options.out.resolve().parent.is_dir():
        raise UserError(f"--out {options.out}: there is no folder {options.out.parent}")
    state = read_state(options.out)
    total_s = 60 * options.minutes
    with tempfile.TemporaryDirectory(prefix="rlearner-bench-models-") as models:
        variables = {MODELS: os.environ.get(MODELS, models)}
        machine = _machine(options, steps[0], state, total_s)
        if machine is not None:
            again = options.again
            run_steps(
                wanted,
                machine,
                state,
                options.out,
                total_s=total_s,
                again=again,
                variables=variables,
            )
    page = options.docs or (PAGE if PAGE.is_file() and not options.cpu else None)
    if page is not None:
        write_table(page, steps, state)
    print(last_line(steps, state))
    bad = [
        name for name, outcome in state.steps.items() if outcome.state in ("failed", "timed out")
    ]
    return 1 if bad else 0


def _obstacle(busy: bool) -> str:
    """Return why the GPUs cannot be measured; empty if they can."""
    gpus, problem = find_gpus()
    if busy:
        gpus = [replace(gpu, used_mib=0) for gpu in gpus]
    return gpu_obstacle(gpus, problem, find_torch())


def _machine(
    options: argparse.Namespace, first: Step, state: State, total_s: float
) -> Machine | None:
    """Return the devices by the first step, which runs at every call; None if it failed.

    Raises:
        UserError: if the file holds outcomes of other devices.
    """
    kind: Literal["cuda", "cpu"] = "cpu" if options.cpu else "cuda"
    run_steps([first], Machine(kind, ("",)), state, options.out, total_s=total_s, again=True)
    devices = tuple(state.steps[first.name].result.get("devices", ()))
    if not devices:
        return None
    machine = Machine(kind, devices)
    name = f"{len(devices)} x {machine.name}"
    if state.device not in ("", name):
        raise UserError(
            f"{options.out} holds outcomes of {state.device}, not of {name}; name another file with --out"
        )
    state.device = name
    return machine


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m bench.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = ", ".join(step.name for step in STEPS)
    made.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="STEP",
        help=f"this step, or several: {names}",
    )
    made.add_argument("--again", action="store_true", help="repeat steps that have run")
    text = "file with the outcomes (%(default)s)"
    made.add_argument("--out", type=Path, default=Path("bench-gpu.json"), metavar="FILE", help=text)
    made.add_argument(
        "--busy", action="store_true", help="measure although other processes use a GPU"
    )
    made.add_argument(
        "--minutes", type=positive, default=30.0, help="for all steps together (%(default)g)"
    )
    made.add_argument(
        "--docs",
        type=Path,
        metavar="PAGE",
        help="page with the table (docs/gpu.md; none with --cpu)",
    )
    made.add_argument("--cpu", action="store_true", help="run the steps small, on CPUs and gloo")
    return made


if __name__ == "__main__":
    sys.exit(main())
