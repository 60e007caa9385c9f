"""Starts and supervises one rollout server per share of GPUs, if there are several shares.

Each is an ordinary server with its own presence. One that crashes restarts; if one rejects its
input, all end.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from broker.errors import UserError
from broker.runtime.process import Stop
from broker.settings.arguments import broker_words
from broker.settings.registry import resolve
from broker.system import gpus
from broker.system.children import spawn
from broker.system.entry import EXIT_USER_ERROR
from rollout.config import RolloutSection
from rollout.engines import ENGINE_ARGS

log = logging.getLogger(__name__)

LOOK_EVERY_S: Final = 0.25
FIRST_RESTART_S: Final = 1.0
LAST_RESTART_S: Final = 30.0
# a server that ran this long did not fail at startup, so its restart delay is reset
STEADY_S: Final = 120.0
LEAVE_S: Final = 30.0  # beyond drain_timeout_s, for a server to close its engine

Command = Callable[[int, Sequence[int]], list[str]]


def gpu_shares(spec: str, section: RolloutSection) -> list[list[int]]:
    """Return the GPUs of each engine; one empty share if GPUs are not numbered or the engine does
    not split them.

    Raises:
        UserError: if ``engine_args.tensor_parallel`` does not divide the number of GPUs.
    """
    if spec in ("auto", "cpu") or section.engine not in ENGINE_ARGS:
        return [[]]
    kind = resolve("engine_args", section.engine, ENGINE_ARGS)
    if not getattr(kind, "one_server_per_share", False):
        return [[]]
    size = kind.model_validate(section.engine_args).tensor_parallel
    numbers = gpus.parse(spec)
    if len(numbers) % size:
        count = f"{len(numbers)} GPU{'s' if len(numbers) > 1 else ''}"
        text = f"--gpus {spec} names {count}, which rollout.engine_args.tensor_parallel={size} does not divide"
        raise UserError(text)
    return [numbers[start : start + size] for start in range(0, len(numbers), size)]


def replica_command(options: argparse.Namespace, run: str, section: RolloutSection) -> Command:
    """Return how to start the server of one share: this process's options with other GPUs, id and
    HTTP port.

    Raises:
        UserError: if the join token came from standard input, which can be read only once.
    """
    if options.join == "-":
        raise UserError(
            "--join -: several servers read the token, so write it to a file and name that"
        )

    def command(index: int, numbers: Sequence[int]) -> list[str]:
        line = [sys.executable, "-m", "rollout.cli", "--run", run, *broker_words(options.broker)]
        line += ["--gpus", ",".join(map(str, numbers))]
        for name, value in (
            ("--join", options.join),
            ("--engine", options.engine),
            ("--policy", options.policy),
            ("--model", options.model),
            ("--snapshot", options.snapshot),
            ("--interface", options.interface),
            ("--bind", options.bind and next_port(options.bind, index)),
            ("--http-bind", options.http_bind),
            ("--tls-cert", options.tls_cert),
            ("--tls-key", options.tls_key),
            ("--id", f"{options.id}-{index}" if options.id else None),
            ("--connect-deadline", options.connect_deadline),
            # 0: any free one
            ("--metrics-port", options.metrics_port and options.metrics_port + 1 + index),
            ("--metrics-bind", options.metrics_bind),
            ("--log-level", options.log_level),
            ("--log-format", options.log_format),
            ("--log-file", options.log_file and own_file(options.log_file, index)),
        ):
            line += [name, str(value)] if value is not None else []
        line += ["--share-gpus"] * options.share_gpus
        line += options.overrides
        if section.http_port is not None:
            # 0: any free one
            line = [
                *line[:3],
                f"--http={section.http_port and section.http_port + index}",
                *line[3:],
            ]
            line = [
                word for word in line if not word.removeprefix("rollout.").startswith("http_port=")
            ]
        return line

    return command


def own_file(path: str, index: int) -> str:
    """Return the log file of one of several servers: ``server.log`` becomes ``server-0.log``."""
    root, end = os.path.splitext(path)
    return f"{root}-{index}{end}"


def next_port(bind: str, index: int) -> str:
    """Return the address of one of several servers: with a port, each has its own."""
    host, colon, port = bind.rpartition(":")
    has_port = colon and port.isdecimal() and (host.endswith("]") or ":" not in host)
    return f"{host}:{int(port) + index}" if has_port else bind


@dataclass
class _Replica:
    line: list[str]
    process: subprocess.Popen[bytes]
    started: float
    wait_s: float = FIRST_RESTART_S
    due: float | None = None  # time of the next restart

    @staticmethod
    def start(line: list[str]) -> _Replica:
        return _Replica(line, _start(line), time.monotonic())


async def run(
    parts: Sequence[Sequence[int]], command: Command, stop: Stop, *, drain_s: float
) -> None:
    """Run the servers until all have exited with 0, or a stop is requested and they have drained.

    Raises:
        UserError: if one of them rejects its input; its own log line names the reason.
    """
    replicas = [_Replica.start(command(index, numbers)) for index, numbers in enumerate(parts)]
    shares = " and ".join(",".join(map(str, numbers)) for numbers in parts)
    log.info("started %d servers, on GPUs %s", len(replicas), shares)
    try:
        while not stop.asked.is_set() and not all(
            replica.process.poll() == 0 for replica in replicas
        ):
            for replica, numbers in zip(replicas, parts, strict=True):
                _look_after(replica, numbers)
            living = sum(replica.process.poll() is None for replica in replicas)
            stop.health.set(
                "ready" if living else "failed", f"{living} of {len(replicas)} servers running"
            )
            await _moment(stop)
    finally:
        await _end(replicas, drain_s)


def _look_after(replica: _Replica, numbers: Sequence[int]) -> None:
    code = replica.process.poll()
    now = time.monotonic()
    gpu_list = ",".join(map(str, numbers))
    if code in (None, 0):
        return
    if code == EXIT_USER_ERROR:
        raise UserError(f"the server on GPUs {gpu_list} could not start; see its error above")
    if replica.due is None:
        replica.wait_s = FIRST_RESTART_S if now - replica.started > STEADY_S else replica.wait_s
        replica.due = now + replica.wait_s
        log.error(
            "the server on GPUs %s exited with code %d, restarting in %.0f s",
            gpu_list,
            code,
            replica.wait_s,
        )
    elif now >= replica.due:
        replica.process = _start(replica.line)
        replica.started = now
        replica.due = None
        replica.wait_s = min(2 * replica.wait_s, LAST_RESTART_S)


def _start(line: list[str]) -> subprocess.Popen[bytes]:
    with os.fdopen(os.dup(1), "ab") as out, os.fdopen(os.dup(2), "ab") as errors:
        return spawn(line, out, errors=errors)


async def _moment(stop: Stop) -> None:
    try:
        async with asyncio.timeout(LOOK_EVERY_S):
            await stop.asked.wait()
    except TimeoutError:
        pass


async def _end(replicas: Sequence[_Replica], drain_s: float) -> None:
    """Let all servers drain, and kill those that do not exit in time."""
    for replica in replicas:
        if replica.process.poll() is None:
            replica.process.terminate()
    give_up = time.monotonic() + drain_s + LEAVE_S
    while (  # noqa: ASYNC110
        any(replica.process.poll() is None for replica in replicas) and time.monotonic() < give_up
    ):
        await asyncio.sleep(LOOK_EVERY_S)
    for replica in replicas:
        if replica.process.poll() is None:
            replica.process.kill()
            replica.process.wait()
