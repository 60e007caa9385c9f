"""What every process does the same way: exit codes, signals, drain, logging, uvloop, joining a run, presence,
metrics.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import resource
import secrets
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from functools import partial
from types import FrameType
from typing import Any, Final, TypeVar

import uvloop

from broker.contract import wire
from broker.contract.streams import CONTROL, RUNS, token
from broker.errors import ConfigError, LostState, RlearnerError, UserError
from broker.jetstream.bus import Bus
from broker.nats.nats_errors import NoStream
from broker.runtime.member import Member, Stop
from broker.settings.arguments import positive
from broker.settings.runspec import check_digests, discover_run, wait_for_runspec
from broker.system import logs
from broker.system.entry import EXIT_FAULT, EXIT_STOPPED, output_is_closed, refuse
from broker.system.reminders import Reminders

__all__ = ["Member", "Stop", "Stopped", "add_join_options", "join", "main", "unless_stopped"]

log = logging.getLogger(__name__)

T = TypeVar("T")

DEFAULT_BROKER: Final = "nats://127.0.0.1:4222"
POLL_S: Final = 0.5
FEW_FILES: Final = 4096
GARBAGE_AFTER: Final = 50_000  # objects made and not freed; see _collect_rarely


class Stopped(RlearnerError):
    """Asked to stop before there was anything to undo; the process ends with the exit code that ``main`` was given for
    it.
    """


# -------------------------------------------------------------------------------------------------------- main


def main(role: str, body: Callable[[Stop], Coroutine[Any, Any, int | None]], *, stopped: int = 0) -> int:
    """Run a process's coroutine on uvloop until it returns; the exit code. To be called inside
    ``broker.system.entry.enter``.

    What ``body`` returns, None for 0. 2: UserError, printed as one line ``error: …`` on stderr without a traceback.
    1: anything else, with a traceback. 130: a second signal. docs/operations.md has the whole table.
    Logs go to stderr, one line each: time, level, run, role, id, message, key=value.

    Args:
        stopped: exit code where ``body`` raises Stopped; of hubs and servers 0, of a command that had something to
        finish 130.
    """
    logs.configure()
    logs.identify(role=role)
    _collect_rarely()
    raise_file_limit()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            stop = Stop()
            with _signals(stop, runner.get_loop()):
                return runner.run(body(stop)) or 0
    except Exception as error:
        if _find(error, Stopped):
            return stopped
        if (broken := _find(error, BrokenPipeError)) and output_is_closed():
            raise broken from None
        if user_error := _find(error, UserError):
            return refuse(user_error)
        if lost := _find(error, LostState):
            logs.say_error(f"{lost}; start this process again: it joins the run once the learner is back")
            return EXIT_FAULT
        log.exception("%s: %s", type(error).__name__, error)
        return EXIT_FAULT


def _collect_rarely() -> None:
    """Look for cycles less often than the interpreter would.

    Hundreds of episodes or requests in flight are live objects that come and go without leaving cycles: at the default
    of 700 the search for them took a fifth of a hub's processor time.
    """
    gc.set_threshold(GARBAGE_AFTER, 10, 10)


def raise_file_limit() -> None:
    """Allow this process as many open files as the machine permits; each connection is one, and 1,024 is a usual
    limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard != resource.RLIM_INFINITY and hard < FEW_FILES:
        log.warning(
            "at most %d files and connections may be open here, too few for a large fleet; raise the hard limit "
            "(ulimit -Hn)",
            hard,
        )


@contextmanager
def _signals(stop: Stop, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """The first SIGINT or SIGTERM asks for a drain, the second ends the process.

    Handlers of the interpreter and not of the loop: the second signal must work although the loop stands still.
    """
    count = 0

    def handle(number: int, _: FrameType | None) -> None:
        nonlocal count
        count += 1
        if count > 1:
            os.write(2, b"second signal, stopped at once\n")
            for end in stop.at_once:
                with suppress(Exception):  # an error here must not keep this process from ending
                    end()
            os._exit(EXIT_STOPPED)
        loop.call_soon_threadsafe(stop.request, signal.Signals(number).name)

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _find(error: BaseException, kind: type[T]) -> T | None:
    """The first of that kind in an error or, since tasks fail in groups, in a group of them."""
    if isinstance(error, kind):
        return error
    members = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    return next((found for member in members if (found := _find(member, kind))), None)


# -------------------------------------------------------------------------------------------------------- join


def add_join_options(parser: argparse.ArgumentParser) -> None:
    """--broker (RL_BROKER, nats://127.0.0.1:4222), --run (RL_RUN, else the one running), --id, --connect-deadline,
    logging.
    """
    add = parser.add_argument
    add(
        "--broker",
        metavar="URL",
        default=os.environ.get("RL_BROKER") or DEFAULT_BROKER,
        help="address of the broker (RL_BROKER, %(default)s)",
    )
    add(
        "--run",
        metavar="NAME",
        default=os.environ.get("RL_RUN") or None,
        help="run to join (RL_RUN, else the only one running)",
    )
    add("--id", metavar="NAME", default=None, help="name of this process, unique in the run (made up)")
    add(
        "--connect-deadline",
        metavar="SECONDS",
        type=positive,
        default=None,
        help="give up when no broker answers in time (never)",
    )
    logs.add_options(parser)


@asynccontextmanager
async def join(
    role: str, options: argparse.Namespace, stop: Stop, *, connected: Callable[[], None] = lambda: None
) -> AsyncIterator[Member]:
    """Connect, wait for the RunSpec, refuse another wire version, follow the desired state; undo all of it on exit.

    Without --run it waits until exactly one run on the broker is not stopped; a run that is stopped is waited for until
    it is resumed. Ends quietly (by Stopped, which ``main`` takes for success) when a stop is requested while waiting.

    Args:
        connected: called once the broker has answered; the run may be waited for after that.

    Raises:
        UserError: several runs to choose from (names them), another wire version, other data files, bad option.
    """
    logs.apply(options)
    process_id = options.id or f"{role}-{os.getpid():x}-{secrets.token_hex(2)}"
    for name, value in (("--id", process_id), ("--run", options.run or "any")):
        _check_option(name, value)
    logs.identify(role=role, process_id=process_id, run=options.run)
    async with AsyncExitStack() as stack:
        connecting = Bus.connect(
            options.broker, options.run or "", name=process_id, deadline_s=options.connect_deadline
        )
        bus = await unless_stopped(stop, connecting)
        stack.push_async_callback(bus.close)
        connected()
        bus.run = options.run or await unless_stopped(stop, _through_losses(bus, discover_run))
        logs.identify(run=bus.run)
        spec = await unless_stopped(stop, _through_losses(bus, partial(_wait_until_running, role)))
        if role == "envhub":  # who reads the data sets
            await asyncio.to_thread(check_digests, spec.data_digests)
        await bus.ensure_streams()
        member = Member(bus, spec, process_id, role, stop)
        stack.push_async_callback(member.leave)
        member.spawn(_follow_control(member))
        member.spawn(_follow_spec(member))
        log.info("joined run %s, epoch %d", bus.run, spec.epoch)
        yield member


def _check_option(name: str, value: str) -> None:
    try:
        token(value, name)
    except ConfigError as error:
        raise UserError(str(error)) from None


async def unless_stopped(stop: Stop, work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine, unless a stop is asked for before it is there.

    Raises:
        Stopped: it was.
    """
    task = asyncio.create_task(work)
    asked = asyncio.create_task(stop.asked.wait())
    try:
        await asyncio.wait({task, asked}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise Stopped(stop.reason)
    finally:
        for one in (task, asked):
            one.cancel()
        await asyncio.gather(task, asked, return_exceptions=True)


async def _through_losses(bus: Bus, wait: Callable[[Bus], Awaitable[T]]) -> T:
    """Wait for something in the buckets; where the broker comes back without its store, a process that has not joined
    waits again.
    """
    while True:
        try:
            return await wait(bus)
        except NoStream as error:
            log.warning("%s; waiting again", error)
            for stream in (RUNS, CONTROL):
                await (await bus.key_value(stream)).ensure()


async def _wait_until_running(role: str, bus: Bus) -> wire.RunSpec:
    """The RunSpec of a run that is not stopped, nor draining where that would end a process of this role."""
    ended = ("stopped", "draining") if role == "envhub" else ("stopped",)
    control = await bus.key_value(CONTROL)
    reminders = Reminders()
    while True:
        spec = await wait_for_runspec(bus, bus.run)
        desired = await control.get(bus.run)
        state = desired[0].state if desired is not None and isinstance(desired[0], wire.DesiredState) else "running"
        if state not in ended:
            return spec
        if reminders.due(time.monotonic()):
            log.info("run %s is %s; waiting for the learner to resume it", bus.run, state)
        await asyncio.sleep(POLL_S)


async def _follow_control(member: Member) -> None:
    control = await member.bus.key_value(CONTROL)
    async for message, _ in control.watch(member.bus.run):
        if isinstance(message, wire.DesiredState) and message.state != member.desired:
            log.info("the desired state of the run is now: %s", message.state)
            member.follow(message.state, message.reason)


async def _follow_spec(member: Member) -> None:
    runs = await member.bus.key_value(RUNS)
    async for message, _ in runs.watch(member.bus.run):
        if isinstance(message, wire.RunSpec) and message.epoch > member.spec.epoch:
            log.info("the learner is back under epoch %d", message.epoch)
            member.renew(message)
