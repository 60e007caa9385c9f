"""The evaluation before the first step measures version 0, and a restart repeats none."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import learner_fleet as fleet
from waits import LONG_S

from broker.contract import wire
from broker.contract.streams import EVALS, EVALTICKETS, WEIGHTS
from broker.jetstream.bus import Bus
from broker.jetstream.core_messages import watch_metrics
from broker.runtime.process import Stop
from broker.settings.run_settings import RunSettings
from learner.reporting.metrics import read_lines
from learner.service import serve_learner

TASKS = 3
EVALUATION = {"every_steps": 2, "tasks": TASKS, "timeout_s": 600.0}


def train_answer(ticket: wire.Ticket) -> list[wire.Message | bytes]:
    return [fleet.group(ticket, ticket.min_version)]


async def offered_version(bus: Bus, at_least: int, epoch: int) -> int:
    async for offer in bus.watch_last(WEIGHTS):
        assert isinstance(offer, wire.WeightsOffer)
        if offer.epoch >= epoch and offer.version >= at_least:
            return offer.version
    raise AssertionError("no offer")


class LateHub(fleet.Hub):
    """Plays evaluated tasks as a server does: by the newest weights. It is late with the first.

    It waits until training cannot go on: version 1 is on offer, or the learner says that it waits.

    Args:
        epoch: of the learner whose weights its server can load.
    """

    def __init__(
        self, bus: Bus, epoch: int = 1, *, is_late: bool = True, plays: bool = True
    ) -> None:
        super().__init__(bus, train_answer)
        self.epoch = epoch
        self.may_play = asyncio.Event()
        self.is_waiting = asyncio.Event()
        self.plays = plays
        if not is_late:
            self.may_play.set()

    async def _serve(self) -> None:
        await asyncio.gather(super()._serve(), self._watch_phase(), self._watch_offers())

    async def stop_learner(self, stop: Stop) -> None:
        """Stop the learner once it waits."""
        await self.is_waiting.wait()
        stop.request("test")

    async def _watch_phase(self) -> None:
        async for metrics in watch_metrics(self.bus, "learner"):
            if metrics.text.get("phase", "").startswith("waiting for the evaluation after step 0"):
                self.is_waiting.set()
                self.may_play.set()

    async def _watch_offers(self) -> None:
        async for offer in self.bus.watch_last(WEIGHTS):
            if isinstance(offer, wire.WeightsOffer) and offer.version > 0:
                self.may_play.set()

    async def _evaluate(self) -> None:
        queue = await self.bus.work_queue(EVALTICKETS, "lake")
        while True:
            for delivery in await queue.fetch(1, 5.0):
                ticket = delivery.message
                assert isinstance(ticket, wire.EvalTicket)
                self.eval_tickets.append(ticket)
                await self.may_play.wait()
                if not self.plays:
                    continue
                version = await offered_version(self.bus, ticket.min_version, self.epoch)
                episode = fleet.trajectory(0, 1.0, version, ticket.number)
                group = fleet.made_up_hub.group(
                    ticket, [episode], eval_step=ticket.eval_step, policy=ticket.policy
                )
                await self.bus.publish(EVALS, group, ticket=ticket.number)
                await delivery.ack()


async def serve(bus: Bus, url: str, config: dict[str, Any], hub: LateHub) -> None:
    async with hub, asyncio.timeout(LONG_S):
        await serve_learner(RunSettings.of_config(config), url, Stop(), connect_deadline_s=60)


def evaluated(folder: Path) -> list[tuple[int, int, int]]:
    """Return step, oldest and newest version of every evaluation in metrics.jsonl."""
    names = ("eval/step", "eval/policy_version_min", "eval/policy_version_max")
    rows = read_lines(folder / "metrics.jsonl")
    return [tuple(int(row[name]) for name in names) for row in rows if "eval/step" in row]  # type: ignore[misc]


async def test_first_evaluation_is_played_by_version_0_alone(
    bus: Bus, broker_url: str, run_name: str, tmp_path: Path
) -> None:
    config = fleet.config(
        str(tmp_path), run_name, eval=EVALUATION, train={"steps": 2, "max_staleness": 4}
    )
    hub = LateHub(bus)
    await serve(bus, broker_url, config, hub)
    assert hub.is_waiting.is_set()
    assert evaluated(tmp_path / run_name) == [(0, 0, 0), (2, 2, 2)]
    rows = read_lines(tmp_path / run_name / "metrics.jsonl")
    assert [row["step"] for row in rows if "eval/step" in row] == [1, 2]


async def test_restart_repeats_no_evaluation(
    bus: Bus, broker_url: str, run_name: str, tmp_path: Path
) -> None:
    folder = tmp_path / run_name

    def config(steps: int) -> dict[str, Any]:
        return fleet.config(
            str(tmp_path), run_name, eval=EVALUATION, train={"steps": steps, "max_staleness": 4}
        )

    # A stop ends the wait, and version 0 stays on offer.
    stop = Stop()
    hub = LateHub(bus, plays=False)
    async with hub, asyncio.timeout(LONG_S):
        stopping = asyncio.create_task(hub.stop_learner(stop))
        await serve_learner(
            RunSettings.of_config(config(2)), broker_url, stop, connect_deadline_s=60
        )
        await stopping
        assert await offered_version(bus, 0, epoch=1) == 0
    assert read_lines(folder / "metrics.jsonl") == []

    hub = LateHub(bus, epoch=2, is_late=False)
    await serve(bus, broker_url, config(2), hub)
    assert evaluated(folder) == [(0, 0, 0), (2, 2, 2)]

    hub = LateHub(bus, epoch=3, is_late=False)
    await serve(bus, broker_url, config(3), hub)
    assert {ticket.eval_step for ticket in hub.eval_tickets} == {3}
    assert evaluated(folder) == [(0, 0, 0), (2, 2, 2), (3, 3, 3)]
