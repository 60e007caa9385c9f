"""A fleet at work with a watch and a tap beside it, and what must hold of it at the end."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import chaos_run as chaos
from reconcile import check_lines, reconcile

from bench.support.fleet import RunFleet, run_audit
from bench.support.watch import FleetWatch
from broker.contract.streams import EPISODES, SAMPLES, TICKETS
from broker.jetstream.bus import Bus

KILLS = int(os.environ.get("RL_CHAOS_KILLS", "5"))  # of each role; `make chaos` has 50
# in a run of its own; `make chaos` has 20
BROKER_KILLS = int(os.environ.get("RL_CHAOS_BROKER_KILLS", "0"))
# longer than ack_wait and the presence TTL; `make chaos` has 60
FREEZE_S = float(os.environ.get("RL_CHAOS_FREEZE_S", "6"))
SEED = int(os.environ.get("RL_CHAOS_SEED", "0"))
LIMIT_S = 240.0  # longest wait for anything, a learner's start on a busy machine among it
# For runs in which the watch itself may lose its broker for longer than two checkpoints take:
# behind the oldest the log is trimmed.
KEEP_ALL: dict[str, Any] = {"every_steps": 5, "keep": 1000}


class World:
    """A fleet at work, with a watch and a tap beside it."""

    def __init__(
        self, fleet: RunFleet, watch: FleetWatch, bus: Bus, folder: Path, steps: int
    ) -> None:
        self.fleet, self.watch, self.bus, self.folder, self.steps = fleet, watch, bus, folder, steps
        self.tap = folder / "tap.jsonl"
        self.tap_pid = 0

    async def reach(self, step: int, limit_s: float = LIMIT_S) -> None:
        await self.watch.until(lambda: self.watch.step() >= step, limit_s)

    def note_blind(self) -> None:
        """The tap's server has been cut off from the others, so it may have missed something
        without knowing.
        """
        os.kill(self.tap_pid, signal.SIGUSR1)

    async def state(self) -> str:
        """What to look at when something has not happened: the newest line, the queues, what is in
        flight, the end of each log.
        """
        said = [f"newest line: {self.watch.lines()[-1:]}", f"crashes: {self.fleet.crashes}"]
        try:
            async with asyncio.timeout(10):
                said += [
                    f"{stream.name}: {await self.bus.depth(stream)}"
                    for stream in (TICKETS, EPISODES, SAMPLES)
                ]
                said.append(f"without a record: {sorted(await self.watch.in_flight())}")
        except TimeoutError:
            said.append("the broker says nothing")
        return "\n".join(
            [
                *said,
                *(
                    f"--- {child.name}, running: {child.running}\n{child.tail(20)}"
                    for child in self.fleet.children
                ),
            ]
        )

    async def finish(self) -> None:
        """The run ends by itself, everyone leaves with 0, and all books agree."""
        await self.reach(self.steps, LIMIT_S + 12 * FREEZE_S)
        await self.fleet.wait_done(self.fleet.children)
        issued = await self.bus.last_seq(TICKETS)
        await self.watch.until(
            lambda: set(range(1, issued + 1)) <= self.watch.first.keys(), LIMIT_S
        )

    async def check(self) -> None:
        """To be called when the tap has ended."""
        assert not self.fleet.crashes, "\n".join(self.fleet.crashes)
        for log in sorted(self.fleet.folder.glob("*.log")):
            assert "Traceback" not in log.read_text(), log
        theirs = [
            path
            for path in [self.watch.folder, *self.watch.folder.rglob("*")]
            if path.stat().st_mode & 0o077
        ]
        assert not theirs, "other users can read these"
        issued = await self.bus.last_seq(TICKETS)
        check_lines(self.watch.lines(), steps=self.steps, max_staleness=chaos.MAX_STALENESS)
        books = reconcile(
            self.watch.folder,
            self.watch.first,
            self.tap,
            issued=issued,
            steps=self.steps,
            groups=chaos.GROUPS,
        )
        assert (books.lost, books.trained_twice, books.wrong) == (set(), set(), []), books
        assert books.trained == self.steps * chaos.GROUPS
        audit = await asyncio.to_thread(run_audit, self.watch.folder, self.fleet.url, self.tap)
        assert (audit["lost"], audit["trained_twice"], audit["open"], audit["problems"]) == (
            0,
            0,
            0,
            [],
        ), audit
        assert (audit["ok"], audit["code"], audit["tickets"], audit["trained"]) == (
            True,
            0,
            issued,
            books.trained,
        )


@asynccontextmanager
async def world(
    folder: Path,
    run: str,
    steps: int,
    pace_s: float = 0.1,
    *,
    make_fleet: Callable[[Path, str], RunFleet] = RunFleet,
    **sections: dict[str, Any],
) -> AsyncIterator[World]:
    """A run of two of each role but learner and broker."""
    file = chaos.write(folder, chaos.config(folder, run, steps=steps, pace_s=pace_s, **sections))
    async with make_fleet(folder / "fleet", run) as fleet:
        bus = await Bus.connect(fleet.url, run, name="watch", deadline_s=60)
        await bus.ensure_streams()
        made = World(fleet, FleetWatch(bus, folder / "runs" / run), bus, folder, steps)
        tap = await asyncio.to_thread(chaos.start_tap, fleet, made.tap)
        made.tap_pid = tap.pid
        watching = asyncio.create_task(made.watch.serve())
        try:
            try:
                chaos.start_all(fleet, file)
                yield made
            except (TimeoutError, AssertionError) as error:
                error.add_note(await made.state())
                raise
            finally:
                await asyncio.to_thread(chaos.stop_tap, tap)
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
            await made.check()
        finally:
            await bus.close()
