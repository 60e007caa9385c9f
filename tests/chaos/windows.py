"""Where a process is hit: just behind a message that crosses the wire, or a change in the run's
folder.

A plain subscriber sees a message when the broker takes it in, which is before its writer has the
confirmation: a hub that is killed then has its record in the log and its ticket unacknowledged; a
broker that is killed then has confirmed nothing.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import nats
from nats.aio.msg import Msg

from bench.support.watch import FleetWatch
from broker.contract.streams import EPISODES, SAMPLES, TICKETS, WEIGHTS, WEIGHTSYNC, Stream
from broker.identity.login import client_options

ANYWHERE = "anywhere"
# of the learner: its books, its line, a checkpoint begun, a checkpoint complete
FILES = ("ledger", "line", "checkpoint", "trim")
# The first five of each role are those of a short run.
WINDOWS: dict[str, tuple[str, ...]] = {
    "learner": (
        "ticket",
        "ledger",
        "checkpoint",
        "trim",
        "offer",
        ANYWHERE,
        "line",
        "join",
        "trimmed",
        "sample",
    ),
    "rollout": ("join", ANYWHERE, "offer", "join", ANYWHERE),
    "envhub": ("sent", ANYWHERE, "sent", "ticket", "sent"),
    "rewardhub": ("scored", ANYWHERE, "scored", "episode", "scored"),
    "broker": ("sample", "ticket", "episode", "offer", ANYWHERE),
}
WITHIN_S = 20.0  # a window that does not open by then: it is anywhere
Strike = Callable[[], None]


class Windows:
    """Waits for a window of one process, and strikes in it."""

    def __init__(self, run: str, watch: FleetWatch) -> None:
        self._run, self._watch = run, watch
        self._armed: list[
            tuple[Callable[[str, dict[str, Any]], bool], Strike, asyncio.Future[None]]
        ] = []

    async def on_message(self, message: Msg) -> None:
        """Every message of the run."""
        if self._armed:
            body = _decode(message.data)
            for armed in [armed for armed in self._armed if armed[0](message.subject, body)]:
                self._armed.remove(armed)
                armed[1]()
                armed[2].set_result(None)

    async def strike(self, window: str, victim: str, act: Strike) -> str:
        """Wait for the window and act in it; the window, or ``anywhere`` if it did not open in
        time.

        Args:
            victim: id of the process.
        """
        if window == ANYWHERE:
            act()
            return window
        if window in FILES:
            return await self._on_file(window, act)
        opened = asyncio.get_running_loop().create_future()
        self._armed.append((self._condition(window, victim), act, opened))
        try:
            async with asyncio.timeout(WITHIN_S):
                await opened
        except TimeoutError:
            self._armed = [armed for armed in self._armed if armed[2] is not opened]
            act()
            return ANYWHERE
        return window

    def _condition(self, window: str, victim: str) -> Callable[[str, dict[str, Any]], bool]:
        def of(stream: Stream) -> Callable[[str], bool]:
            prefix = stream.all_subjects(self._run).partition("*")[0]
            return lambda subject: subject.startswith(prefix)

        tickets, episodes, samples, offers, joins = map(
            of, (TICKETS, EPISODES, SAMPLES, WEIGHTS, WEIGHTSYNC)
        )
        purge = f"$JS.API.STREAM.PURGE.{SAMPLES.stream_name(self._run)}"
        conditions: dict[str, Callable[[str, dict[str, Any]], bool]] = {
            "ticket": lambda subject, body: tickets(subject),
            "episode": lambda subject, body: episodes(subject),
            "sample": lambda subject, body: samples(subject),
            "offer": lambda subject, body: offers(subject) and not joins(subject),
            "join": lambda subject, body: (
                joins(subject) and victim in ("learner", body.get("server"))
            ),
            "sent": lambda subject, body: (
                (episodes(subject) or samples(subject)) and body.get("hub") == victim
            ),
            "scored": lambda subject, body: (
                samples(subject) and body.get("reward_hubs", [])[-1:] == [victim]
            ),
            "trimmed": lambda subject, body: subject == purge,
        }
        return conditions[window]

    async def _on_file(self, window: str, act: Strike) -> str:
        checkpoints, metrics, ledger = (
            self._watch.folder / name for name in ("checkpoints", "metrics.jsonl", "ledger")
        )

        def size_of_ledger() -> int:
            return sum(path.stat().st_size for path in ledger.glob("step-*.jsonl"))

        def listed() -> set[str]:
            return set(os.listdir(checkpoints)) if checkpoints.exists() else set()

        names, line, books = listed(), metrics.stat().st_size, size_of_ledger()
        opened: dict[str, Callable[[], bool]] = {
            "ledger": lambda: size_of_ledger() != books,
            "line": lambda: metrics.stat().st_size != line,
            "checkpoint": lambda: any(not name.startswith("step-") for name in listed() - names),
            "trim": lambda: any(name.startswith("step-") for name in listed() - names),
        }
        try:
            await self._watch.until(opened[window], WITHIN_S, every_s=0.001)
        except TimeoutError:
            window = ANYWHERE
        act()
        return window


@asynccontextmanager
async def windows(url: str, run: str, watch: FleetWatch) -> AsyncIterator[Windows]:
    """Look at the wire of a run, through restarts of the broker."""
    made = Windows(run, watch)

    async def ignore(_: Exception) -> None:
        """The connection comes back by itself."""

    client = await nats.connect(
        url,
        **client_options(url),
        name="windows",
        max_reconnect_attempts=-1,
        reconnect_time_wait=0.1,
        error_cb=ignore,
    )
    try:
        await client.subscribe(f"rl.{run}.>", cb=made.on_message)
        await client.subscribe(
            f"$JS.API.STREAM.PURGE.{SAMPLES.stream_name(run)}", cb=made.on_message
        )
        await client.flush()
        yield made
    finally:
        await client.close()


def _decode(data: bytes) -> dict[str, Any]:
    try:
        body = msgspec.msgpack.decode(data)
    except msgspec.DecodeError:
        return {}
    return body if isinstance(body, dict) else {}
