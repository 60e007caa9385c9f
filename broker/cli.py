"""Run a private broker, show the runs on a broker and its dead letters, control runs."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, get_args, get_type_hints

from broker.contract import wire
from broker.errors import ServerDied, UserError
from broker.jetstream.bus import Bus
from broker.operations import dead_letters, permissions, runs
from broker.runtime import process
from broker.runtime.health import State
from broker.runtime.process import Stop
from broker.server.private_server import BrokerServer, ClusterConfig
from broker.server.server_figures import server_figures
from broker.server.server_supervisor import ServerSupervisor
from broker.settings.arguments import (
    ArgumentParser,
    add_broker,
    add_json,
    complete,
    natural,
    port,
    positive,
)
from broker.settings.run_address import broker_address, find_folder
from broker.system import logs
from broker.system.entry import enter
from broker.system.visible_text import visible_json

LOOK_EVERY_S: Final = 0.5
DEADLINE_S: Final = 2.0  # default of --connect-deadline
STATES: Final = get_args(get_type_hints(wire.DesiredState)["state"])

EXAMPLES: Final = {
    "broker": ["broker serve", "broker status"],
    "broker serve": [
        "broker serve --store runs/broker --port 4222",
        "broker serve --port 0 --store-max-gib 2 --metrics-port 9465",
    ],
    "broker status": ["broker status --broker nats://127.0.0.1:4222"],
    "broker control": ["broker control paused --run quick --reason 'disk is full'"],
    "broker permissions": [
        "broker permissions --run quick --keys keys > rlearner.conf",
        "broker permissions --run quick --role envhub rewardhub --login password",
        "broker permissions --run quick --keys keys --login jwt > accounts.sh",
    ],
    "broker dead": ["broker dead list", "broker dead show 3"],
    "broker dead list": ["broker dead list --run quick"],
    "broker dead show": [
        "broker dead show 3 --run quick",
        "broker dead show 3 --raw > message.bin",
    ],
    "broker dead retry": ["broker dead retry 3 --timeout 60"],
    "broker dead purge": ["broker dead purge --through 10"],
}

Operation = Callable[[Bus, argparse.Namespace], Awaitable[None]]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command ``broker``; return its exit code."""

    def run() -> int:
        options = parser().parse_args(argv)
        body: Callable[[argparse.Namespace, Stop], Any] = options.body
        return process.main("broker", lambda stop: body(options, stop))

    return enter(run)


def parser() -> argparse.ArgumentParser:
    """Return the command's argument parser."""
    root = ArgumentParser(prog="broker", description=__doc__)
    commands = root.add_subparsers(dest="command", required=True, metavar="COMMAND")

    serve = commands.add_parser("serve", help="run a private nats-server until stopped")
    serve.add_argument("--port", type=port, default=4222, help="0 picks a free one (%(default)s)")
    serve.add_argument(
        "--bind",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="an address of this host (%(default)s)",
    )
    serve.add_argument(
        "--store",
        default="runs/broker",
        metavar="FOLDER",
        help="folder of the streams (%(default)s)",
    )
    text = (
        "folder of the keys that may connect, shared by the servers of a cluster "
        "(FOLDER.keys of the store)"
    )
    serve.add_argument("--keys", metavar="FOLDER", help=text)
    text = "largest size of the store (%(default)s)"
    serve.add_argument("--store-max-gib", type=positive, default=8.0, metavar="GIB", help=text)
    serve.add_argument(
        "--sync-always", action="store_true", help="fsync every message before it is confirmed"
    )
    serve.add_argument(
        "--cluster",
        metavar="NAME",
        help="one of three servers of this cluster (with the next three)",
    )
    serve.add_argument("--node", metavar="NAME", help="name of this server, unique in the cluster")
    serve.add_argument(
        "--cluster-port", type=port, metavar="PORT", help="port for the other servers"
    )
    serve.add_argument("--routes", metavar="HOST:PORT,…", help="cluster ports of the other servers")
    process.add_metrics_options(serve)
    logs.add_options(serve)
    add_json(serve, "print one JSON object for each line")
    serve.set_defaults(body=_serve)

    status = commands.add_parser(
        "status", help="show the runs on a broker, their processes and streams"
    )
    _add_operator_options(status, runs.status)

    control = commands.add_parser(
        "control", help="set the state that all processes of a run follow"
    )
    control.add_argument("state", choices=STATES, help="the desired state of the run")
    control.add_argument("--reason", default="", help="one line that the processes log")
    _add_operator_options(control, runs.control)

    text = "print the users of a run for the configuration file of your own nats-server"
    allowed = commands.add_parser("permissions", help=text)
    permissions.add_options(allowed)
    allowed.set_defaults(body=_permissions)

    letters = commands.add_parser("dead", help="messages that could not be used")
    dead = letters.add_subparsers(dest="dead", required=True, metavar="COMMAND")
    _add_operator_options(
        dead.add_parser("list", help="list them, one line each"), dead_letters.list_letters
    )
    show = dead.add_parser("show", help="show one completely")
    show.add_argument("number", type=natural, help="number in `broker dead list`")
    form = show.add_mutually_exclusive_group()
    form.add_argument(
        "--raw", action="store_true", help="write only the original bytes to standard output"
    )
    add_json(form, "print one JSON object, with the whole message")
    _add_operator_options(show, dead_letters.show_letter, json=False)
    retry = dead.add_parser(
        "retry", help="process one again now to see the result, which is not trained on"
    )
    retry.add_argument("number", type=natural, help="number in `broker dead list`")
    text = "longest wait for each process (%(default)s)"
    retry.add_argument("--timeout", type=positive, default=300.0, metavar="SECONDS", help=text)
    _add_operator_options(retry, dead_letters.retry_letter)
    purge = dead.add_parser("purge", help="delete them")
    purge.add_argument(
        "--through", type=natural, default=None, metavar="NUMBER", help="only up to this number"
    )
    _add_operator_options(purge, dead_letters.purge_letters)
    return complete(root, EXAMPLES)


def _add_operator_options(
    parser: argparse.ArgumentParser, operation: Operation, *, json: bool = True
) -> None:
    run = os.environ.get("RL_RUN") or None
    add_broker(parser, is_noted=True)
    if json:
        add_json(parser)
    text = "which run: its name, or its folder (RL_RUN, else the only one)"
    parser.add_argument("--run", metavar="RUN", default=run, help=text)
    text = "give up after (%(default)s)"
    parser.add_argument(
        "--connect-deadline", type=positive, default=DEADLINE_S, metavar="SECONDS", help=text
    )

    async def body(options: argparse.Namespace, stop: Stop) -> None:
        logging.getLogger().setLevel("ERROR")  # the result is printed
        working = asyncio.create_task(operate(options))
        stop_request = asyncio.create_task(stop.asked.wait())
        await asyncio.wait([working, stop_request], return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            stop_request.cancel()
            await working
        else:
            working.cancel()
            await asyncio.wait([working])

    parser.set_defaults(body=body, operation=operation)


def find_broker(options: argparse.Namespace) -> str:
    """Return the address of the run's broker; replace the run's folder by its name."""
    folder = find_folder(options.run) if options.run else None
    if folder is not None:
        options.run = folder.resolve().name
    return broker_address(options.broker, folder)


async def operate(options: argparse.Namespace) -> None:
    """Connect to the broker of the run, perform the operation of the arguments, disconnect."""
    bus = await Bus.connect(
        find_broker(options),
        "",
        name=f"operator-{os.getpid()}",
        deadline_s=options.connect_deadline,
    )
    try:
        await options.operation(bus, options)
    finally:
        await bus.close()


async def _permissions(options: argparse.Namespace, stop: Stop) -> None:
    permissions.show_permissions(options)


async def _serve(options: argparse.Namespace, stop: Stop) -> None:
    logs.apply(options)
    logs.identify(process_id=options.node or "broker")
    process.serve_metrics(options, stop)
    server = BrokerServer(
        options.store,
        keys=options.keys,
        port=options.port,
        bind=options.bind,
        sync_always=options.sync_always,
        store_max_gib=options.store_max_gib,
        cluster=_cluster(options),
    )
    await asyncio.to_thread(server.start)
    try:
        server_info = {
            "broker": server.url,
            "store": str(server.store),
            "log": str(server.log_path),
        }
        text = f"broker at {server.url}, store {server.store}, log {server.log_path}"
        print(visible_json(server_info) if options.json else text, flush=True)
        stop.health.set("ready", f"broker at {server.url}")
        # this command exits so that a service manager restarts it
        keeper = ServerSupervisor(server, revive=False)
        while server.running and not stop.asked.is_set():
            for event in await asyncio.to_thread(keeper.look):
                print(visible_json({"event": event}) if options.json else event, flush=True)
                state: State = "failed" if keeper.full else "ready"
                stop.health.set(state, event if keeper.full else f"broker at {server.url}")
            if options.metrics_port is not None:
                stop.figures.values = await asyncio.to_thread(server_figures, server)
            await _sleep_unless(stop, LOOK_EVERY_S)
        if not server.running:
            raise ServerDied(f"nats-server exited unexpectedly, see {server.log_path}")
    finally:
        await asyncio.to_thread(server.stop)


def _cluster(options: argparse.Namespace) -> ClusterConfig | None:
    names = ("--cluster", "--node", "--cluster-port", "--routes")
    options_by_flag = dict(
        zip(
            names,
            (options.cluster, options.node, options.cluster_port, options.routes),
            strict=True,
        )
    )
    if not any(options_by_flag.values()):
        return None
    if missing := [name for name, value in options_by_flag.items() if not value]:
        raise UserError(
            f"one server of a cluster needs {', '.join(options_by_flag)}; missing: {', '.join(missing)}"
        )
    routes = tuple(route.strip() for route in options.routes.split(",") if route.strip())
    return ClusterConfig(
        name=options.cluster, node=options.node, port=options.cluster_port, routes=routes
    )


async def _sleep_unless(stop: Stop, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await stop.asked.wait()
    except TimeoutError:
        return


if __name__ == "__main__":
    sys.exit(main())
