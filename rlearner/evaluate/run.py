"""Runs ``rlearner eval``: a rollout server, an environment hub and a reward hub, without a learner.

The model is a separate policy with fixed weights; tickets, tasks and seeds are those of an
evaluation in a run.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Final

from rich.progress import Progress

from broker.contract import wire
from broker.contract.streams import CONTROL
from broker.errors import ConfigError, UserError
from broker.jetstream.bus import Bus
from broker.runtime.presence import Roster
from broker.runtime.process import Stop, Stopped
from broker.server.private_server import BrokerServer
from broker.settings.config import PRIVATE_STORE_GIB
from broker.settings.run_address import UP_LOCK
from broker.settings.run_settings import RunSettings
from broker.settings.runspec import publish_runspec
from broker.system.locks import lock
from broker.system.private_files import private_write
from broker.system.visible_text import visible
from envhub.config import check_templates
from learner.disk_retry import DiskRetry
from learner.evaluation.evaluation import Evaluation, EvaluationQueue
from learner.evaluation.evaluator import Evaluator
from learner.prepare import data_digests, make_folder, run_folder, write_config
from learner.reporting.transcripts import TranscriptFactory
from learner.run_folder import STORE
from rlearner.evaluate.report import format_report, result_of
from rlearner.up.fleet import ProcessFleet
from rlearner_text.config import check_model_path
from rlearner_text.model_checks import KEY, check_trained_model

POLICY: Final = "evaluated"
WATCH_EVERY_S: Final = 0.25
# Share of the tasks between two lines of progress, where there is no terminal for a bar.
PRINT_EVERY: Final = 0.1


async def evaluate_model(
    settings: RunSettings,
    model: str,
    stop: Stop,
    num_tasks: Mapping[str, int],
    files: Mapping[str, str],
    *,
    gpus: str,
    as_json: bool,
) -> None:
    """Measure a model, print the result, and write it to ``runs/<name>/result.json``.

    Args:
        model: folder or hub name.
        num_tasks: how many tasks of each domain are measured.
        files: domains whose whole file is measured, and the file.

    Raises:
        UserError: if there is no such model, another evaluation of this name is running, a process
            rejected its input or died, or no task could be measured.
    """
    logging.getLogger().setLevel("WARNING")
    path = await asyncio.to_thread(_find_model, model, settings)
    folder = run_folder(settings.run)
    began = time.monotonic()
    with lock(make_folder(folder) / UP_LOCK, _busy_message(folder), wait_s=0.5) as claim:
        write_config(folder, settings.to_plain())
        fleet = ProcessFleet(folder / "logs", {})
        store_max_gib = settings.broker.store_max_gib or PRIVATE_STORE_GIB
        server = BrokerServer(str(folder / STORE), store_max_gib=store_max_gib)
        # Tickets count from 1, so those of an earlier evaluation of this name must go.
        server.discard_streams()
        with server as broker:
            # Other programs find the private broker by this file.
            claim.write(f"{os.getpid()}\n{broker.url}\n".encode())
            claim.flush()
            try:
                processes = _start_processes(
                    settings,
                    path,
                    broker.url,
                    fleet=fleet,
                    gpus=gpus,
                    folder=folder,
                    stop=stop,
                    num_tasks=num_tasks,
                )
                async with processes as (bus, evaluator, evaluations):
                    await wait_until_measured(
                        fleet, evaluator, evaluations.pending[0], stop, quiet=as_json
                    )
                    control = bus.key_value(CONTROL)
                    await control.put(
                        bus.run, wire.DesiredState(state="stopped", reason="the evaluation is done")
                    )
                    completed = list(evaluator.completed)
            finally:
                await asyncio.to_thread(fleet.stop, patience_s=10.0)
    fleet.raise_for_failures()
    if stop.asked.is_set():
        print("stopped before all tasks were measured", file=sys.stderr)
        raise Stopped(stop.reason)
    if not completed:
        raise UserError(f"no task could be measured; see {folder / 'logs'}")
    result = result_of(completed[0], model, time.monotonic() - began, files)
    private_write(folder / "result.json", f"{json.dumps(result, indent=2)}\n".encode())
    if as_json:
        print(json.dumps(result))
    else:
        print(visible(format_report(result, folder), newlines=True))


def _busy_message(folder: Path) -> str:
    return (
        f"{folder}: another `rlearner eval` or `up` is running there; "
        "wait for it, or choose another run.name"
    )


def _find_model(model: str, settings: RunSettings) -> str:
    """Return the model's absolute folder, or its hub name.

    Raises:
        ConfigError: if there is no such model, or the domains cannot be played with it.
    """
    check_model_path(model, "MODEL")
    section = settings.model.model_copy(update={"path": model})
    try:
        check_templates(settings, check_trained_model(section, from_hub=True, is_trained=False))
    except ConfigError as error:
        # The user named the model on the command line, not in the configuration.
        key = "MODEL" if error.key == KEY else error.key
        raise ConfigError(key, error.value, error.allowed) from None
    folder = Path(model).expanduser()
    return str(folder.absolute()) if folder.is_dir() else model


@asynccontextmanager
async def _start_processes(
    settings: RunSettings,
    model: str,
    url: str,
    fleet: ProcessFleet,
    gpus: str,
    folder: Path,
    stop: Stop,
    num_tasks: Mapping[str, int],
) -> AsyncIterator[tuple[Bus, Evaluator, EvaluationQueue]]:
    """Start all processes and issue the tickets; results are read until the context exits."""
    async with AsyncExitStack() as stack:
        run = str(settings.run.name)
        bus = await Bus.connect(url, run, name="eval", deadline_s=30.0)
        stack.push_async_callback(bus.close)
        await bus.ensure_streams()
        digests = await asyncio.to_thread(data_digests, settings)
        spec = wire.RunSpec(
            run,
            wire.WIRE_VERSION,
            epoch=0,
            config=settings.to_plain(),
            model_path=model,
            data_digests=digests,
        )
        await publish_runspec(bus, spec)
        await bus.key_value(CONTROL).put(run, wire.DesiredState(state="running"))
        fleet.env |= {"RL_BROKER": url, "RL_RUN": run}
        server_args = ["--policy", POLICY, "--model", model, "--gpus", gpus, "--id", "rollout-1"]
        fleet.add("rollout-server", "rollout.cli", server_args)
        fleet.add("envhub", "envhub.cli", ["--id", "envhub-1"])
        fleet.add("rewardhub", "rewardhub.cli", ["--id", "rewardhub-1"])
        roster = Roster(bus, beats=("rollout",))
        await roster.start()
        stack.push_async_callback(roster.close)
        evaluations = EvaluationQueue(
            settings.eval, settings.domains, settings.run.seed, num_tasks=num_tasks
        )
        disk_retry = DiskRetry(folder, stop, "the evaluated episodes are not kept")
        transcripts = TranscriptFactory(settings.model.model_copy(update={"path": model}), folder)
        evaluator = Evaluator(
            bus,
            evaluations,
            roster,
            folder=folder / "evals",
            baseline="",
            disk_retry=disk_retry,
            transcripts=transcripts,
        )
        tasks = [asyncio.create_task(work) for work in evaluator.services()]
        stack.push_async_callback(_cancel_tasks, tasks)
        evaluator.start(0, POLICY, min_version=0)
        yield bus, evaluator, evaluations


async def _cancel_tasks(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def wait_until_measured(
    fleet: ProcessFleet, evaluator: Evaluator, evaluation: Evaluation, stop: Stop, *, quiet: bool
) -> None:
    """Show progress until all tasks are measured, a child cannot run, or a stop is requested."""
    total = len(evaluation.waiting)
    printed_share = 0.0
    bar = Progress(disable=quiet or not sys.stdout.isatty())
    with bar:
        line = bar.add_task("measuring", total=total)
        while evaluator.busy and not stop.asked.is_set() and not fleet.failed:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.asked.wait(), WATCH_EVERY_S)
            for event in fleet.watch():
                print(visible(str(event)), file=sys.stderr)
            num_measured = total - len(evaluation.waiting)
            bar.update(line, completed=num_measured)
            if bar.disable and not quiet and num_measured >= total * (printed_share + PRINT_EVERY):
                printed_share = num_measured / max(total, 1)
                now = time.strftime("%Y-%m-%d %H:%M:%S")
                print(f"{now}  {num_measured} of {total} tasks", flush=True)
