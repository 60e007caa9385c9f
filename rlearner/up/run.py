"""Runs ``rlearner up``: all processes of a run on one machine, shown live, stopped cleanly.

It takes no part in the run: it starts the processes as a person would by hand, and shows their
metrics and presence.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shlex
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.live import Live

from broker.errors import UserError
from broker.jetstream.bus import Bus
from broker.jetstream.core_messages import watch_metrics
from broker.runtime.presence import Roster
from broker.runtime.process import Stop
from broker.server.private_server import BrokerServer
from broker.server.server_supervisor import ServerSupervisor
from broker.settings.config import PRIVATE_STORE_GIB, RunSection
from broker.settings.run_settings import RunSettings
from learner.checkpoints.checkpoint import newest_checkpoint
from learner.prepare import nothing_left, refuse_fewer_steps, run_folder
from learner.resume_checks import check_continuing
from learner.run_folder import STORE, noted_epoch
from rlearner.advise.advice import bottleneck_line
from rlearner.ops.continue_line import continue_line
from rlearner.ops.folder_cleanup import removed_on_failure
from rlearner.up.artifacts import write_artifacts
from rlearner.up.event_log import note_events
from rlearner.up.fleet import FleetProcess, ProcessFleet
from rlearner.up.live_state import LiveRunState
from rlearner.up.output import Output
from rlearner.up.processor_times import ProcessorTimes
from rlearner.up.run_claim import RunClaim, refuse_other_broker
from rlearner.up.shutdown_display import ShutdownDisplay
from rlearner.up.view import draw_screen
from rollout.checks import refuse_sleepless

LOOPBACK = "127.0.0.1"
# A child that ended is seen this soon. What is shown changes once a second at most, and drawing it
# costs milliseconds, which a small run would notice.
WATCH_EVERY_S = 0.25
DRAW_EVERY_S = 1.0
# The learner writes its last checkpoint in this time.
LEARNER_PATIENCE_S = 30.0
# After its end the others have nothing left to store.
OTHERS_PATIENCE_S = 10.0
# Hubs wake up for each message, and would interrupt the learner or a server that needs all cores.
# They can wait for milliseconds: enough requests are under way.
HUB_NICE = 10


async def is_completed(settings: RunSettings, say: Output) -> bool:
    """Return whether the run has made all its steps, and print so; call it before any write.

    Raises:
        UserError: if the run is live, has made more steps than that, or only another broker has its
            streams.
    """
    run_folder(settings.run)  # fails where no folder can be created
    run, folder = _name_and_folder(settings.run)
    newest = newest_checkpoint(folder / "checkpoints")
    steps = settings.train.steps
    if newest is not None and newest.step == steps:
        text = nothing_left(run, steps)
        resume = continue_line(settings).strip()
        say(
            "completed",
            f"{text}\n{resume}".rstrip(),
            run=run,
            steps=steps,
            message=text,
            next=resume,
        )
        return True
    refuse_fewer_steps(folder, run, steps)
    await refuse_other_broker(folder, run)
    return False


def _name_and_folder(run: RunSection) -> tuple[str, Path]:
    """Return the run's name, and its folder as the user would write it."""
    name = str(run.name)
    return name, Path(run.dir) / name


async def run_processes(
    settings: RunSettings,
    args: list[str],
    stop: Stop,
    say: Output,
    *,
    force: bool = False,
    rebase: bool = False,
    share_gpus: bool = False,
    listen: tuple[str, int] = (LOOPBACK, 0),
) -> None:
    """Start everything, show it, and stop it at its end, on a signal, or if a child cannot run.

    Args:
        settings: with ``run.name`` set.
        args: for ``rlearner start``: the file and the overrides.
        say: prints what happens.
        force: see ``learner/resume_checks.py``.
        rebase: continue even if the private broker's store is lost.
        share_gpus: learner and server take turns on their devices.
        listen: address and port of the private broker, port 0: any.

    Raises:
        UserError: if the run cannot continue with these settings, a child rejected its input, or
            another ``rlearner up`` holds the folder.
    """
    if share_gpus:
        refuse_sleepless(settings.rollout.engine)
    run, folder = _name_and_folder(settings.run)
    store_max_gib = settings.broker.store_max_gib or PRIVATE_STORE_GIB
    settings = settings.with_values("broker", store_max_gib=store_max_gib)
    changed = await asyncio.to_thread(check_continuing, settings, force=force)
    flags = [*["--force"] * force, *["--rebase"] * rebase, *["--share-gpus"] * share_gpus]
    with removed_on_failure(folder), RunClaim(folder, run) as claim:
        logs = folder / "logs"
        say("started", f"run {run}, logs in {logs}", run=run, folder=str(folder), logs=str(logs))
        for change in changed:
            say("changed", f"changed since the last start: {change}", change=change)
        await _run_fleet(
            settings,
            run,
            folder,
            args=[*args, *flags],
            stop=stop,
            say=say,
            claim=claim,
            listen=listen,
            share_gpus=share_gpus,
        )


async def _run_fleet(
    settings: RunSettings,
    run: str,
    folder: Path,
    *,
    args: list[str],
    stop: Stop,
    say: Output,
    claim: RunClaim,
    listen: tuple[str, int],
    share_gpus: bool,
) -> None:
    logs = folder / "logs"
    began = time.monotonic()
    epoch = noted_epoch(folder)
    store_max_gib = settings.broker.store_max_gib or PRIVATE_STORE_GIB
    bind, port = listen
    server = BrokerServer(
        str(folder / STORE),
        bind=bind,
        port=port,
        sync_always=settings.broker.sync_always,
        store_max_gib=store_max_gib,
        num_procs=1,
    )
    with server as broker:
        if bind != LOOPBACK:
            text = (
                f"other hosts join at {broker.url} with a token: rlearner invite envhub --run {run}"
            )
            say("listening", text, broker=broker.url)
        # Other commands find the private broker by this file.
        claim.note(broker.url)
        fleet = ProcessFleet(logs, {"RL_BROKER": broker.url, "RL_RUN": run})
        stop.at_once.append(fleet.kill)
        try:
            # The learner applies the limit of the store to the streams that it makes.
            learner_args = ["start", *args, f"broker.store_max_gib={store_max_gib}"]
            learner = fleet.add("learner", "rlearner.cli", learner_args)
            fleet.add(
                "rollout-server",
                "rollout.cli",
                ["--id", "rollout-1", *["--share-gpus"] * share_gpus],
            )
            _add_policy_servers(fleet, settings, share_gpus=share_gpus)
            for hub in ("envhub", "rewardhub"):
                fleet.add(hub, f"{hub}.cli", ["--id", f"{hub}-1"], nice=HUB_NICE)
            evaluation = settings.eval
            if evaluation.every_steps and "random" in (evaluation.baseline, *evaluation.against):
                # The value of an override is YAML, which includes JSON.
                engine_args = f"engine_args={json.dumps(evaluation.baseline_args)}"
                random_args = ["--engine", "random", "--policy", "random", "--id", "random-1"]
                fleet.add("rollout-random", "rollout.cli", [*random_args, engine_args])
            await _show_run(settings, broker, fleet, learner=learner, stop=stop, say=say)
            cpu_s = {child.name: sum(child.cpu.values()) for child in fleet.children}
            cpu_s |= {
                "broker": sum(ProcessorTimes().read([broker.pid]).values()),
                "this view": time.process_time(),
            }
        finally:
            display = ShutdownDisplay()
            patience_s = stop_patience_s(fleet.children, has_request=stop.asked.is_set())
            await asyncio.to_thread(fleet.stop, ("learner",), patience_s=patience_s, show=display)
            display.close()
    try:
        fleet.raise_for_failures()
    except UserError:
        if noted_epoch(folder) != epoch:
            say("failed", continue_line(settings).strip())
        raise
    resume = continue_line(settings).strip() or f"again: rlearner up {shlex.join(args)}"
    write_artifacts(folder, time.monotonic() - began, cpu_s, resume, say)


def _add_policy_servers(fleet: ProcessFleet, settings: RunSettings, *, share_gpus: bool) -> None:
    """Add a server for each teacher and policy that has weights of its own."""
    served = {
        f"teacher-{name}": teacher.policy or name
        for name, teacher in settings.teachers.items()
        if teacher.model_path is not None
    }
    served |= {
        f"policy-{name}": name
        for name, section in settings.policies.items()
        if section.model_path is not None
    }
    for server, policy in served.items():
        arguments = ["--policy", policy, "--id", server, *["--share-gpus"] * share_gpus]
        fleet.add(server, "rollout.cli", arguments)


def stop_patience_s(children: Iterable[FleetProcess], *, has_request: bool) -> float:
    """Return how many seconds the fleet gets to end after its first signal.

    Args:
        has_request: whether somebody asked for the stop; else the learner has ended or a child
            cannot run.
    """
    is_learning = any(child.name == "learner" and child.running for child in children)
    return LEARNER_PATIENCE_S if has_request or is_learning else OTHERS_PATIENCE_S


async def _show_run(
    settings: RunSettings,
    broker: BrokerServer,
    fleet: ProcessFleet,
    learner: FleetProcess,
    stop: Stop,
    say: Output,
) -> None:
    """Show the run until the learner exits, a child cannot run, or a signal arrives."""
    console = Console()
    # rich takes FORCE_COLOR for a terminal, where cursor movements would fill a file.
    is_live = console.is_interactive and sys.stdout.isatty() and not say.as_json
    board = LiveRunState(str(settings.run.name), settings.train.steps)
    events: list[str] = []
    supervisor = ServerSupervisor(broker)
    bus = await Bus.connect(broker.url, board.run, name="up", deadline_s=30.0)
    roster = Roster(bus)
    advice: asyncio.Future[str] | None = None
    advice_began = 0.0
    try:
        await bus.ensure_streams()
        await roster.start()
        steps: asyncio.Queue[tuple[str, dict[str, float]]] = asyncio.Queue()
        reader = asyncio.create_task(_read_metrics(bus, board, steps))
        # It would draw the same screen again in a thread of its own.
        display = Live(console=console, auto_refresh=False) if is_live else contextlib.nullcontext()
        with display as live:
            phase = ""
            drawn_at = 0.0
            while not stop.asked.is_set() and learner.exit_code is None and not fleet.failed:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stop.asked.wait(), WATCH_EVERY_S)
                new_events: list[str] = [*fleet.watch()]
                if not new_events and time.monotonic() - drawn_at < DRAW_EVERY_S:
                    continue
                drawn_at = time.monotonic()
                new_events += await asyncio.to_thread(supervisor.look)
                present = [
                    presence
                    for role in ("learner", "rollout", "envhub", "rewardhub")
                    for presence in roster.alive(role)
                ]
                new_events += board.see(present, time.monotonic())
                events += new_events
                note_events(fleet.logs, new_events)
                if advice is None and (rows := board.history.due()):
                    advice_began = time.monotonic()
                    # In a thread: a simulation takes seconds, and the view must go on.
                    advice = asyncio.ensure_future(
                        asyncio.to_thread(bottleneck_line, rows, settings)
                    )
                elif advice is not None and advice.done():
                    previous = board.bottleneck
                    board.bottleneck = advice.result()
                    advice = None
                    board.history.computed(time.monotonic() - advice_began)
                    # The text after the stage changes with each advice.
                    stages = [text.partition(";")[0] for text in (previous, board.bottleneck)]
                    if live is None and stages[0] != stages[1]:
                        say.stamped("bottleneck", f"bottleneck: {board.bottleneck}")
                news = board.news
                board.news = []
                if live is not None:
                    live.update(draw_screen(board, events, fleet.logs), refresh=True)
                    continue
                for line in new_events:
                    say.stamped("process", line)
                while not steps.empty():
                    line, figures = steps.get_nowait()
                    say.stamped("step", line, step=int(figures["step"]), figures=figures)
                for line in news:
                    say.stamped("warning", line)
                if board.phase != phase and not board.step:
                    phase = board.phase
                    say.stamped("phase", phase)
                if failed := board.failures.news(time.monotonic(), fleet.logs):
                    say.stamped("failed_groups", failed)
        reader.cancel()
        # A reader that failed has left the view without figures.
        if reader.done() and not reader.cancelled() and (error := reader.exception()):
            raise error
    finally:
        await roster.close()
        await bus.close()
    if stop.asked.is_set():
        print("stopping everything; press Ctrl-C again to stop at once", file=sys.stderr)


async def _read_metrics(
    bus: Bus, board: LiveRunState, steps: asyncio.Queue[tuple[str, dict[str, float]]]
) -> None:
    async for metrics in watch_metrics(bus):
        if board.take(metrics, time.monotonic()):
            steps.put_nowait((board.plain(), dict(board.line)))
