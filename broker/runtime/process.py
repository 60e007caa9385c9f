"""What every process does in the same way: exit codes, signals, drain, logging, joining a run."""

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
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, TypeVar

import uvloop

from broker.contract import wire
from broker.contract.streams import CONTROL, RUNS, check_token
from broker.errors import ConfigError, LostState, RlearnerError, StartAgain, UserError, described
from broker.identity import tokens
from broker.identity.login import Login
from broker.identity.trust import is_trusted, trust_owner
from broker.jetstream.bus import Bus
from broker.runtime.member import Member, Stop
from broker.runtime.service_manager import ServiceManager
from broker.settings.arguments import add_broker, port, positive
from broker.settings.consent import check_consent
from broker.settings.host_rules import HostRules, add_rule_options, host_rules
from broker.settings.runspec import check_digests, discover_run, wait_for_runspec
from broker.system import logs
from broker.system.entry import EXIT_FAULT, EXIT_STOPPED, output_is_closed, refuse
from broker.system.reminders import Reminders

__all__ = [
    "Member",
    "Stop",
    "Stopped",
    "add_join_options",
    "add_metrics_options",
    "join",
    "main",
    "serve_metrics",
    "unless_stopped",
]

if TYPE_CHECKING:
    from prometheus_client.registry import Collector

log = logging.getLogger(__name__)

T = TypeVar("T")

LOOPBACK: Final = "127.0.0.1"

POLL_S: Final = 0.5
FEW_FILES: Final = 4096
# Objects made and not freed; see _collect_rarely.
GARBAGE_AFTER: Final = 50_000


class Stopped(RlearnerError):
    """A stop was requested with nothing to undo; ``main`` returns ``stopped_code``."""


# -------------------------------------------------------------------------------------------------
# main


def main(
    role: str, body: Callable[[Stop], Coroutine[Any, Any, int | None]], *, stopped_code: int = 0
) -> int:
    """Run a process's coroutine on uvloop and return the exit code; call it inside ``enter``.

    The code is what ``body`` returns, None for 0; 2 for a UserError, printed as one line ``error:
    …``; 1 for any other error, with a traceback; 130 for a second signal. ``EXIT_CODES``
    has the whole table.

    Args:
        stopped_code: exit code if ``body`` raises Stopped: 0 for hubs and servers, 130 for commands
            with unfinished work.
    """
    logs.configure()
    logs.identify(role=role)
    manager = ServiceManager.take(os.environ)
    _collect_rarely()
    raise_file_limit()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            stop = Stop()
            if manager is not None:
                manager.attach(stop.health)
            with _handle_signals(stop, runner.get_loop()):
                return runner.run(_keep_beating(stop, body(stop))) or 0
    except Exception as error:
        if _find_error(error, Stopped):
            return stopped_code
        if (broken := _find_error(error, BrokenPipeError)) and output_is_closed():
            raise broken from None
        if manager is not None:
            manager.say(described(error))
        if user_error := _find_error(error, UserError):
            return refuse(user_error)
        if failed := _find_error(error, StartAgain):
            logs.say_error(str(failed))
            return EXIT_FAULT
        if lost_state := _find_error(error, LostState):
            logs.say_error(
                f"{lost_state}; start this process again: it joins the run once the learner is back"
            )
            return EXIT_FAULT
        log.exception("%s: %s", type(error).__name__, error)
        return EXIT_FAULT


async def _keep_beating(stop: Stop, work: Coroutine[Any, Any, T]) -> T:
    """Keep the process's health beating while it works."""
    beating = asyncio.create_task(stop.health.keep_beating())
    try:
        return await work
    finally:
        beating.cancel()
        if stop.close_metrics is not None:
            stop.close_metrics()


def _collect_rarely() -> None:
    """Collect cycles less often than by default.

    Episodes and requests in flight are hundreds of live objects without cycles: at the default
    threshold of 700 the search took a fifth of a hub's processor time.
    """
    gc.set_threshold(GARBAGE_AFTER, 10, 10)


def raise_file_limit() -> None:
    """Raise the limit of open files to the hard one; each connection takes one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard != resource.RLIM_INFINITY and hard < FEW_FILES:
        log.warning(
            "at most %d open files, too few for a large fleet; raise the hard limit (ulimit -Hn)",
            hard,
        )


@contextmanager
def _handle_signals(stop: Stop, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """Let the first SIGINT or SIGTERM request a drain, and the second end the process.

    These are handlers of the interpreter, not of the loop: the second signal must work while the
    loop is blocked.
    """
    count = 0

    def handle(number: int, _: FrameType | None) -> None:
        nonlocal count
        count += 1
        if count > 1:
            os.write(2, b"second signal, stopped at once\n")
            for end in stop.at_once:
                # An error must not keep this process from ending.
                with suppress(Exception):
                    end()
            os._exit(EXIT_STOPPED)
        loop.call_soon_threadsafe(stop.request, signal.Signals(number).name)

    old_handlers = {
        number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in old_handlers.items():
            signal.signal(number, handler)


def _find_error(error: BaseException, kind: type[T]) -> T | None:
    """Return the first error of a kind, also from an exception group, in which tasks fail."""
    if isinstance(error, kind):
        return error
    members = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    return next((match for member in members if (match := _find_error(member, kind))), None)


# -------------------------------------------------------------------------------------------------
# metrics


def add_metrics_options(
    parser: argparse.ArgumentParser, *, default: int | None = None, text: str = "of this process"
) -> None:
    """Add --metrics-port and --metrics-bind."""
    text = (
        f"serve /metrics (Prometheus), /healthz and /readyz {text} on this port; 0 picks one "
        "and logs it"
    )
    text += " (off)" if default is None else " (%(default)s)"
    parser.add_argument("--metrics-port", type=port, default=default, metavar="PORT", help=text)
    text = "IP address for --metrics-port; all who reach it can read it (%(default)s)"
    parser.add_argument("--metrics-bind", default=LOOPBACK, metavar="ADDRESS", help=text)


def serve_metrics(options: argparse.Namespace, stop: Stop, *collectors: Collector) -> None:
    """Serve the figures of this process until it ends, if the options ask for it.

    Args:
        collectors: more to show on ``/metrics``.

    Raises:
        UserError: if the address or the port cannot be used.
    """
    if getattr(options, "metrics_port", None) is None or stop.close_metrics is not None:
        return
    from broker.runtime.metrics_endpoint import MetricsEndpoint  # imports aiohttp
    from broker.runtime.process_collector import LoopLag, ProcessCollector

    lag = LoopLag()
    own = ProcessCollector(stop.figures, stop.health, lag)
    endpoint = MetricsEndpoint(
        options.metrics_bind, options.metrics_port, stop.health, own, *collectors
    )
    log.info("metrics at %s/metrics", endpoint.url)
    measuring = asyncio.get_running_loop().create_task(lag.measure())

    def close() -> None:
        measuring.cancel()
        endpoint.close()

    stop.close_metrics = close


# -------------------------------------------------------------------------------------------------
# join


def add_join_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of broker, run, id, deadline, metrics and logging."""
    add = parser.add_argument
    run = os.environ.get("RL_RUN") or None
    add_broker(parser)
    add(
        "--run", metavar="NAME", default=run, help="run to join (RL_RUN, else the only one running)"
    )
    text = "join token of another host or user, from `rlearner invite`; - reads standard input"
    add("--join", metavar="FILE", help=text)
    text = (
        "with --join: from now on run code for the token's owner (files, commands, weaker "
        "isolation)"
    )
    add("--trust-run-code", action="store_true", help=text)
    add_rule_options(parser)
    add("--id", metavar="NAME", help="name of this process, unique in the run (generated)")
    add(
        "--connect-deadline",
        metavar="SECONDS",
        type=positive,
        help="time limit for reaching a broker (none)",
    )
    add_metrics_options(parser)
    logs.add_options(parser)


@asynccontextmanager
async def join(
    role: str,
    options: argparse.Namespace,
    stop: Stop,
    *,
    connected: Callable[[], None] = lambda: None,
) -> AsyncIterator[Member]:
    """Connect, wait for the RunSpec, check the wire version and follow the desired state; undo all
    of it on exit.

    Without --run it waits until exactly one run on the broker is not stopped. A stopped run is
    awaited until it is resumed. Raises Stopped, a success for ``main``, if a stop is requested
    while waiting.

    Args:
        connected: called once the broker has answered; waiting for the run may follow.

    Raises:
        UserError: if several runs exist (names them), or the wire version, the data files or an
            option is wrong.
    """
    logs.apply(options)
    process_id = options.id or f"{role}-{os.getpid():x}-{secrets.token_hex(2)}"
    for name, value in (("--id", process_id), ("--run", options.run or "any")):
        _check_option(name, value)
    logs.identify(role=role, process_id=process_id, run=options.run)
    serve_metrics(options, stop)

    def reached() -> None:
        stop.health.joined()
        connected()

    stop.health.set("starting", "waiting for a broker")
    async with AsyncExitStack() as stack:
        url, run, login = _read_token(options, role)
        if run is None:
            run = await unless_stopped(stop, _discover_run(options, process_id, reached))
        deadline_s = options.connect_deadline
        connecting = Bus.connect(
            url, run, name=process_id, role=role, login=login, deadline_s=deadline_s
        )
        bus = await unless_stopped(stop, connecting)
        stack.push_async_callback(bus.close)
        logs.identify(run=bus.run)
        stop.health.set("starting", f"waiting for run {bus.run}")
        reached()
        spec = await unless_stopped(stop, _wait_until_running(role, bus))
        rules = host_rules(options) if bus.link.login.owner else HostRules()
        _check_consent(bus, spec, rules)
        if role == "envhub":  # which reads the data sets
            await asyncio.to_thread(check_digests, spec.data_digests)
        await bus.ensure_streams()
        member = Member(bus, spec, process_id, role, stop)
        stack.push_async_callback(member.leave)
        member.spawn(_follow_control(member))
        member.spawn(_follow_spec(member, rules))
        member.spawn(_end_when_refused(bus))
        log.info("joined run %s, epoch %d", bus.run, spec.epoch)
        yield member


def _check_option(name: str, value: str) -> None:
    try:
        check_token(value, name)
    except ConfigError as error:
        raise UserError(str(error)) from None


async def unless_stopped(stop: Stop, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine unless a stop is requested first.

    Raises:
        Stopped: if a stop is requested.
    """
    task = asyncio.create_task(work)
    stop_request = asyncio.create_task(stop.asked.wait())
    try:
        await asyncio.wait({task, stop_request}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise Stopped(stop.reason)
    finally:
        for waiter in (task, stop_request):
            waiter.cancel()
        await asyncio.gather(task, stop_request, return_exceptions=True)


def _read_token(options: argparse.Namespace, role: str) -> tuple[str, str | None, Login | None]:
    """Return the broker, the run, and the login, if the options have a join token.

    Raises:
        UserError: if the token cannot be used, or is for another run than --run.
    """
    if options.join is None:
        if options.trust_run_code:
            raise UserError(
                "--trust-run-code goes with --join; runs of this machine's own user are trusted"
            )
        for name in ("allow_secret", "allow_data"):
            if getattr(options, name):
                option = name.replace("_", "-")
                raise UserError(
                    f"--{option} goes with --join; runs of this machine's own user are trusted"
                )
        return options.broker, options.run, None
    join_token = tokens.read_token(options.join, role)
    if options.run not in (None, join_token.run):
        raise UserError(
            f"--run {options.run}: the token {options.join} is for run {join_token.run}"
        )
    if options.trust_run_code:
        trust_owner(join_token.owner)
    return join_token.broker, join_token.run, join_token.login


def _check_consent(bus: Bus, spec: wire.RunSpec, rules: HostRules) -> None:
    """Check that this host accepts another owner's run; limit this process's secrets.

    Raises:
        UserError: if it does not; names the settings.
    """
    if owner := bus.link.login.owner:
        rules.enforce()
        check_consent(spec, rules, is_trusted=is_trusted(owner))


async def _discover_run(
    options: argparse.Namespace, name: str, connected: Callable[[], None]
) -> str:
    """Return the only run on the broker that is not stopped; the operator's key sees all runs."""
    bus = await Bus.connect(options.broker, "", name=name, deadline_s=options.connect_deadline)
    try:
        connected()
        return await discover_run(bus)
    finally:
        await bus.close()


async def _wait_until_running(role: str, bus: Bus) -> wire.RunSpec:
    """Return the RunSpec of a run that does not stop processes of this role."""
    end_states = ("stopped", "draining") if role == "envhub" else ("stopped",)
    control = bus.key_value(CONTROL)
    reminders = Reminders()
    while True:
        spec = await wait_for_runspec(bus, bus.run)
        desired = await control.get(bus.run)
        state = (
            desired[0].state
            if desired is not None and isinstance(desired[0], wire.DesiredState)
            else "running"
        )
        if state not in end_states:
            return spec
        if reminders.due(time.monotonic()):
            log.info("run %s is %s; waiting for the learner to resume it", bus.run, state)
        await asyncio.sleep(POLL_S)


async def _follow_control(member: Member) -> None:
    control = member.bus.key_value(CONTROL)
    async for message, _ in control.watch(member.bus.run):
        if isinstance(message, wire.DesiredState) and message.state != member.desired:
            log.info("the desired state of the run is now: %s", message.state)
            member.follow(message.state, message.reason)


async def _end_when_refused(bus: Bus) -> None:
    """Raise the error of a refused key; other processes get the work in progress."""
    refusal = await asyncio.shield(bus.link.refused)
    await bus.link.close()
    raise refusal


async def _follow_spec(member: Member, rules: HostRules) -> None:
    runs = member.bus.key_value(RUNS)
    async for message, _ in runs.watch(member.bus.run):
        if isinstance(message, wire.RunSpec) and message.epoch > member.spec.epoch:
            log.info("the learner is back under epoch %d", message.epoch)
            _check_consent(member.bus, message, rules)
            member.renew(message)
            await member.bus.renew_queues()
