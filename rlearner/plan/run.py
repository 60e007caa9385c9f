"""Plans one configuration: reads it and its models, finds plans, writes the first."""

from __future__ import annotations

import argparse
import sys

from broker.errors import UserError
from broker.settings.config import RunSection
from broker.settings.config_file import locate
from broker.settings.runspec import load
from learner.prepare import generate_name, run_folder
from rlearner.plan.facts import GIB, MOST_GPUS, Machine
from rlearner.plan.plans import make_plans
from rlearner.plan.reader import WorkloadReader
from rlearner.plan.report import as_json, as_text
from rlearner.plan.write import check_folder, diff_sections, write_plan


def plan_run(options: argparse.Namespace) -> int:
    """Print plans, and write the first of them with ``--write``; return the exit code.

    Raises:
        UserError: if the configuration is wrong, or nothing fits.
    """
    machine = machine_of(options.gpus, options.gpu_memory, options.hosts)
    if options.write is not None:
        check_folder(options.write)
    reader = WorkloadReader(options.config, options.overrides)
    work = reader.read()
    plans = make_plans(work, machine, options.plans, reader.read)
    notes: list[str] = []
    if options.write is not None:
        overrides = diff_sections(load(options.config), reader.config)
        run = reader.settings.run.name or generate_name(options.config)
        source = locate(options.config)
        files = write_plan(
            options.write,
            plans[0],
            work.demands,
            machine,
            source=source,
            overrides=overrides,
            run=run,
        )
        notes.append(f"wrote plan 1: {' '.join(map(str, files))}")
        if (folder := run_folder(RunSection(name=run, dir=reader.settings.run.dir))).exists():
            notes.append(
                f"run {run} exists in {folder}: the scripts continue it; "
                "for a new run, set run.name"
            )
    format_plans = as_json if options.json else as_text
    print(format_plans(plans, work.model, work.demands, machine))
    for note in notes:
        print(note, file=sys.stderr)
    return 0


def machine_of(gpus: int, gpu_memory: float, hosts: int) -> Machine:
    """Return the GPUs of --gpus, --gpu-memory in GiB and --hosts.

    Raises:
        UserError: if they cannot be spread, or have no memory.
    """
    machine = Machine(gpus, gpu_memory * GIB, hosts)
    if machine.gpus > MOST_GPUS:
        raise UserError(f"--gpus {machine.gpus}: too many; at most {MOST_GPUS}")
    if machine.gpus % machine.hosts:
        raise UserError(
            f"--hosts {machine.hosts}: hosts have equally many GPUs; "
            f"it must divide --gpus {machine.gpus}"
        )
    if machine.available <= 0:
        raise UserError(
            f"--gpu-memory {gpu_memory:g}: too small; give the GiB of one GPU, for example 80"
        )
    return machine
