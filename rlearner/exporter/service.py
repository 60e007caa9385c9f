"""Follows a run through its broker, and serves what it sees; a broker or a process that dies does
not end it.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import time
from collections.abc import Collection
from contextlib import suppress
from typing import Any, Final

from broker.contract import wire
from broker.contract.permissions import OBSERVER, OPERATOR
from broker.contract.streams import (
    CONTROL,
    DEAD,
    METRICS,
    ROLES,
    RUNS,
    STREAMS,
    WEIGHTS,
    Stream,
    StreamKind,
)
from broker.contract.wire import PlainSettings
from broker.errors import LostState, UserError
from broker.identity import tokens
from broker.identity.login import Login
from broker.jetstream.api import call_api
from broker.jetstream.bus import Bus
from broker.jetstream.stored_message import peek_message
from broker.nats.client import Msg
from broker.nats.nats_errors import ApiError, Disconnected
from broker.runtime.presence import Roster
from broker.runtime.process import Stop, serve_metrics, unless_stopped
from broker.settings.run_address import broker_address
from broker.settings.run_settings import stored_value
from broker.settings.runspec import find_runs
from broker.system import logs
from broker.system.reminders import Reminders
from learner.credit.store_gate import replica_usage
from learner.run_folder import find_run
from rlearner.exporter.run_figures import BrokerFigures, Queue, RunFigures

log = logging.getLogger(__name__)

ASK_EVERY_S: Final = 5.0
WAIT_S: Final = 1.0
ANSWER_WITHIN_S: Final = 10.0
STORED: Final = (StreamKind.WORK_QUEUE, StreamKind.LOG, StreamKind.LAST_VALUE, StreamKind.KV)
NO_ANSWER: Final = (TimeoutError, Disconnected, LostState, ApiError)
# the others are known by their entries, at a twentieth of the messages
BEATS: Final = ("learner", "rollout")


async def export(options: argparse.Namespace, stop: Stop) -> None:
    """Serve until a stop is requested; ``options`` are those of ``rlearner.exporter.cli``.

    Raises:
        UserError: if the run has no folder here and no broker is named, or the port cannot be used.
    """
    logs.apply(options)
    run, url, login = _find_address(options)
    logs.identify(run=run, role="exporter", process_id=f"exporter-{os.getpid()}")
    figures = RunFigures(run)
    serve_metrics(options, stop, figures)
    stop.health.set("starting", "waiting for a broker")
    name = f"exporter-{os.getpid()}"
    role = OBSERVER if login is not None else OPERATOR
    connecting = Bus.connect(
        url, run, name=name, role=role, login=login, deadline_s=options.connect_deadline
    )
    bus = await unless_stopped(stop, connecting)
    try:
        stop.health.joined()
        await unless_stopped(stop, _run_there(bus, stop))
        await _follow(bus, figures, stop)
    finally:
        await bus.close()


async def _run_there(bus: Bus, stop: Stop) -> None:
    """Wait until the broker knows the run: processes of a run may start in any order."""
    reminders = Reminders()
    while True:
        try:
            runs = await _list_runs(bus)
        except NO_ANSWER as error:
            status = f"waiting for run {bus.run}; {_describe_failure(error)}"
        else:
            if bus.run in runs:
                return
            names = ", ".join(sorted(runs)) or "none"
            status = f"waiting for run {bus.run}; the broker at {bus.link.where} has {names}"
        stop.health.set("starting", status)
        if reminders.due(time.monotonic()):
            log.warning("%s", status)
        await asyncio.sleep(WAIT_S)


async def _list_runs(bus: Bus) -> Collection[str]:
    """Return the runs of the broker, as far as this login may know them."""
    if bus.link.login.role != OBSERVER:
        return await find_runs(bus)
    return [bus.run] if await bus.key_value(RUNS).get_bytes(bus.run) is not None else []


def _find_address(options: argparse.Namespace) -> tuple[str, str, Login | None]:
    """Return the run's name, the address of its broker, and the login of an observer's token, if
    there is one.

    Raises:
        UserError: if the run has no folder here and ``--broker`` is not given, or the token cannot
            be used.
    """
    if options.join is not None:
        login = tokens.read_token(options.join, OBSERVER)
        if options.run_name != login.run:
            raise UserError(
                f"exporter {options.run_name}: the token {options.join} is for run {login.run}"
            )
        return login.run, login.broker, login.login
    try:
        place = find_run(options.run_name, options.dir)
    except UserError:
        if not (url := options.broker or os.environ.get("RL_BROKER")):
            raise
        return options.run_name, url, None
    return place.name, broker_address(options.broker, place.folder), None


async def _follow(bus: Bus, figures: RunFigures, stop: Stop) -> None:
    async def receive(message: Msg) -> None:
        figures.hear(message.subject, message.data)

    subscribed = await bus.link.subscribe(METRICS.all_subjects(bus.run), receive)
    roster = Roster(bus, beats=BEATS, members=[role for role in ROLES if role not in BEATS])
    listening = False
    stopping = asyncio.create_task(stop.asked.wait())
    advising = asyncio.create_task(asyncio.to_thread(figures.advise))
    ends: list[asyncio.Future[Any]] = [stopping, bus.link.refused]
    try:
        while not stopping.done():
            if bus.link.refused.done():
                raise bus.link.refused.result()
            figures.is_connected = bus.link.connected.is_set()
            if not listening and figures.is_connected:
                listening = await _listen(roster, figures)
            await _ask_once(bus, figures, stop)
            figures.forget_silent()
            if advising.done():  # it may take long on a busy machine, and the questions go on
                advising = asyncio.create_task(asyncio.to_thread(figures.advise))
            await asyncio.wait(ends, timeout=ASK_EVERY_S, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
        await asyncio.gather(advising, return_exceptions=True)
        with suppress(OSError, Disconnected):  # the broker has gone, and with it the subscriptions
            await roster.close()
            await subscribed.close()


async def _listen(roster: Roster, figures: RunFigures) -> bool:
    """Begin to hear processes; return whether that worked."""
    try:
        async with asyncio.timeout(ANSWER_WITHIN_S):
            await roster.start()
    except (*NO_ANSWER, OSError) as error:
        log.debug("processes are not heard yet: %s", error)
        with suppress(OSError, Disconnected):
            await roster.close()
        return False
    figures.listen(lambda: [process for role in ROLES for process in roster.alive(role)])
    return True


async def _ask_once(bus: Bus, figures: RunFigures, stop: Stop) -> None:
    try:
        async with asyncio.timeout(ANSWER_WITHIN_S):
            figures.answer(await ask_broker(bus))
    except NO_ANSWER as error:
        figures.fail()
        figures.is_connected = bus.link.connected.is_set()
        reason = _describe_failure(error)
        if stop.health.state != "failed":
            log.warning("run %s: %s; asking again every %g s", bus.run, reason, ASK_EVERY_S)
        stop.health.set("failed", f"run {bus.run}: {reason}")
        return
    if stop.health.state != "ready":
        log.info("run %s: its broker answers", bus.run)
    stop.health.set("ready", f"run {bus.run}")


async def ask_broker(bus: Bus) -> BrokerFigures:
    """Return what the broker knows about a run; one request per stream and queue.

    Raises:
        ApiError: if it refuses, for example because it has no stream of this run.
        LostState: if it has no bucket of this run.
    """
    stored_streams = [stream for stream in STREAMS if stream.kind in STORED]
    details = {DEAD.name: {"subjects_filter": DEAD.all_subjects(bus.run)}}
    infos = await asyncio.gather(
        *(bus.info(stream, details.get(stream.name)) for stream in stored_streams)
    )
    states = {
        stream.name: info["state"] for stream, info in zip(stored_streams, infos, strict=True)
    }
    queues = await asyncio.gather(
        *(_queues(bus, stream) for stream in stored_streams if stream.kind is StreamKind.WORK_QUEUE)
    )
    spec = await bus.key_value(RUNS).get(bus.run)
    desired = await bus.key_value(CONTROL).get(bus.run)
    config: PlainSettings = {}
    if spec is not None and isinstance(spec[0], wire.RunSpec):
        config = spec[0].config
    replicas = int(infos[0]["config"].get("num_replicas", 1))
    used_bytes, limit = replica_usage(await call_api(bus.link, "INFO"), replicas)
    configured = stored_value(config, "broker", "store_max_gib")
    if configured is not None:
        limit = min(limit or int(configured * 2**30), int(configured * 2**30))
    return BrokerFigures(
        queues=[queue for of_stream in queues for queue in of_stream],
        messages={name: int(state["messages"]) for name, state in states.items()},
        sizes={name: int(state["bytes"]) for name, state in states.items()},
        dead=_dead_letters(states[DEAD.name]),
        store_bytes=used_bytes,
        store_limit_bytes=limit,
        desired=desired[0].state
        if desired is not None and isinstance(desired[0], wire.DesiredState)
        else "running",
        spec=spec[0] if spec is not None and isinstance(spec[0], wire.RunSpec) else None,
        offer=await _offer(bus, int(states[WEIGHTS.name]["last_seq"])),
    )


def _dead_letters(state: dict[str, Any]) -> dict[str, int]:
    """Return the dead letters by stream, 0 for a queue or log without any."""
    sources = [
        stream.name
        for stream in STREAMS
        if stream.kind in (StreamKind.WORK_QUEUE, StreamKind.LOG) and stream.messages
    ]
    letters = {
        subject.rpartition(".")[2]: int(count)
        for subject, count in (state.get("subjects") or {}).items()
    }
    return dict.fromkeys(sources, 0) | letters


async def _queues(bus: Bus, stream: Stream) -> list[Queue]:
    """Return the queue of each subject, also of those without a message."""
    listed = await call_api(bus.link, f"CONSUMER.LIST.{stream.stream_name(bus.run)}")
    return [
        Queue(
            stream=stream.name,
            subject=str(consumer["config"].get("filter_subject", "")),
            pending=int(consumer["num_pending"]),
            held=int(consumer["num_ack_pending"]),
            redelivered=int(consumer["num_redelivered"]),
            waiting_pulls=int(consumer["num_waiting"]),
        )
        for consumer in listed.get("consumers") or ()
    ]


async def _offer(bus: Bus, last: int) -> wire.WeightsOffer | None:
    record = await peek_message(bus, WEIGHTS, last) if last else None
    message = record.record.message if record is not None else None
    return message if isinstance(message, wire.WeightsOffer) else None


def _describe_failure(error: Exception) -> str:
    return (
        "its broker does not answer"
        if isinstance(error, TimeoutError | Disconnected)
        else str(error)
    )
