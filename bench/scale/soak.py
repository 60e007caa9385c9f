"""Weeks of a run in virtual time: the real ledger, issuer, reaper and evaluator, with a simulated fleet and trainer.

1,000 steps of 20 minutes on two domains, with pauses of 8 hours, hubs that are away for a day, and one domain renamed
on a resume.
"""

from __future__ import annotations

import asyncio
import random
import socket
import tempfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from bench.scale.virtual import MemoryBus, run
from broker.contract import wire
from broker.contract.streams import EVALS, EVALTICKETS, SAMPLES, TICKETS
from broker.runtime.process import Stop
from broker.settings.config import DomainSection
from learner.config import EvalSection
from learner.credit import record_intake
from learner.credit.ledger import Action, ForgetTicket, IssueTicket, Ledger
from learner.credit.ticket_rules import DomainRule, TicketRules
from learner.credit.tickets import TicketIssuer, TicketReaper
from learner.disk_retry import DiskRetry
from learner.evaluation.evaluation import EvaluationQueue
from learner.evaluation.evaluator import Evaluator
from learner.reporting.transcripts import TranscriptFactory

STEPS: Final = 1_000
STEP_S: Final = 1_200.0
GROUPS: Final = 64
STALENESS: Final = 4
# groups that the fleet plays at once: a little slower than the learner, so that tickets queue for an hour
AT_ONCE: Final = 15
GROUP_S: Final = (60.0, 540.0)
HOUR_S: Final = 3_600.0
PAUSE_AT: Final = (100, 101, 400, 800)  # steps behind which the operator pauses the run for 8 hours
AWAY_AT: Final = (250, 700)  # steps behind which every hub is away for a day
RENAME_AT: Final = 500
LOOK_S: Final = 15.0
TIMEOUT_S: Final = 1_800.0  # of a ticket


class SoakFleet:
    """Hubs as one: takes tickets while it is there and the run is not paused, and ends each after some minutes."""

    def __init__(self, bus: MemoryBus, domains: set[str]) -> None:
        self.bus, self.domains = bus, domains
        self.is_there, self.paused, self.version = True, False, 0
        self.num_played = 0
        self._random = random.Random(0)
        self._working: dict[asyncio.Task[None], wire.Ticket | wire.EvalTicket] = {}

    def alive(self, role: str) -> list[wire.Presence]:
        if role != "envhub" or not self.is_there:
            return []
        host, serves = socket.gethostname(), sorted(self.domains)
        return [wire.Presence(role=role, id="hubs", host=host, pid=1, state="serving", serves=serves)]

    def leave(self) -> None:
        """Kill every hub: tickets in progress return to their queue."""
        self.is_there = False
        for task, ticket in self._working.items():
            task.cancel()
            self.bus.give_back(EVALTICKETS if isinstance(ticket, wire.EvalTicket) else TICKETS, ticket.domain, ticket)
        self._working.clear()

    async def serve(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            if not self.is_there or self.paused:
                continue
            for stream in (EVALTICKETS, TICKETS):
                for domain in sorted(self.domains):
                    while len(self._working) < AT_ONCE and (ticket := self.bus.take(stream, domain)) is not None:
                        assert isinstance(ticket, wire.Ticket | wire.EvalTicket)
                        task = asyncio.create_task(self._play(ticket, self.version))
                        self._working[task] = ticket
                        task.add_done_callback(lambda done: self._working.pop(done, None))

    async def _play(self, ticket: wire.Ticket | wire.EvalTicket, version: int) -> None:
        left_s = self._random.uniform(*GROUP_S)
        while left_s > 0:  # during a pause the servers are away, too, and what is in hand stands still
            await asyncio.sleep(min(left_s, 2 * LOOK_S))
            left_s -= 0.0 if self.paused else 2 * LOOK_S
        is_eval = isinstance(ticket, wire.EvalTicket)
        self.num_played += not is_eval
        runs = wire.column([version, 1], "<i4")
        one = wire.Trajectory(
            episode=0,
            token_ids=wire.column([1, 2], "<i4"),
            loss_mask=wire.column([0, 1], "|u1"),
            logprobs=wire.column([0.0, -1.0], "<f4"),
            version_runs=runs,
            turns=[],
            reward=0.0,
            reward_parts={},
            success=False,
            end="terminated",
        )
        group = wire.Group(
            ticket=ticket.number,
            domain=ticket.domain,
            task_index=ticket.task_index,
            min_version=ticket.min_version,
            hub="hubs",
            deliveries=1,
            pools=[],
            trajectories=[one],
            eval_step=ticket.eval_step if isinstance(ticket, wire.EvalTicket) else -1,
        )
        await self.bus.publish(EVALS if is_eval else SAMPLES, group, ticket=ticket.number)


class SoakLearner:
    """The learner's loop around the real ledger: records in, a step of 20 minutes whenever one is full."""

    def __init__(
        self, bus: MemoryBus, fleet: SoakFleet, ledger: Ledger, rules: TicketRules, folder: Path, epoch: int
    ) -> None:
        self.bus, self.fleet, self.ledger, self.rules, self.epoch = bus, fleet, ledger, rules, epoch
        self.paused = False
        around: Any = bus
        self.issuer = TicketIssuer(around, TICKETS)
        roster: Any = fleet
        self.reaper = TicketReaper(around, ledger, roster, TIMEOUT_S, lambda: self.paused, every_s=LOOK_S)
        domains = {rule.name: DomainSection(env="frozenlake", deadline_s=600.0) for rule in rules.domains}
        section = EvalSection(every_steps=50, tasks=16, at_start=False, timeout_s=3_600.0)
        evaluations = EvaluationQueue(section, domains, 0, first_number=bus._last.get(EVALTICKETS.name, 0) + 1)
        patience = DiskRetry(folder, Stop(), "the soak")
        self.evaluator = Evaluator(
            around, evaluations, roster, folder, "", patience, TranscriptFactory({}, folder), every_s=LOOK_S
        )
        self.boundary = ledger.dump()

    async def run(self, until: int) -> None:
        """Make steps up to ``until``; return between two steps."""
        change = wire.RulesChange(epoch=self.epoch, rules=self.rules.plain())
        await self.bus.publish(SAMPLES, change)
        for number in range(await self.bus.last_seq(TICKETS) + 1, self.ledger.state.issued + 1):
            # what the last life granted and did not publish, as in learner.credit.recovery
            self.issuer.put(self.ledger.ticket(number))
        self._perform(self.ledger.open_credit())
        work = (self._read(until), self.issuer.serve(), self.reaper.serve(), *self.evaluator.services())
        tasks = [asyncio.create_task(one) for one in work]
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)  # only the reading ends by itself
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            task.result()

    async def _read(self, until: int) -> None:
        async for entry in self.bus.read_log(SAMPLES, self.ledger.state.position + 1):
            self._perform(self.ledger.apply(record_intake.read_record(entry, self.ledger, 10).record, entry.seq))
            while self.ledger.full:
                await self._step()
            if self.ledger.state.version >= until and self.ledger.state.rules_epoch >= self.epoch:
                return

    async def _step(self) -> None:
        await asyncio.sleep(STEP_S)
        self._perform(self.ledger.complete_step())
        self.boundary = self.ledger.dump()
        step = self.fleet.version = self.ledger.state.version
        self.evaluator.step_completed(step, self.ledger.rules.steps)
        if step in PAUSE_AT:
            self.paused = self.fleet.paused = True
            await asyncio.sleep(8 * HOUR_S)
            self.paused = self.fleet.paused = False
        if step in AWAY_AT:
            self.fleet.leave()
            await asyncio.sleep(24 * HOUR_S)
            self.fleet.is_there = True

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, IssueTicket):
                self.issuer.put(action.ticket)
            elif isinstance(action, ForgetTicket):
                self.issuer.withdraw(action.number)


async def _soak(folder: Path) -> dict[str, Any]:
    lake, maze, mine = (DomainRule(name, 1.0, 8, 1, 600.0) for name in ("lake", "maze", "mine"))
    rules = TicketRules(STEPS, GROUPS, STALENESS, "wait", 0, (lake, maze))
    bus = MemoryBus("soak", "learner")
    fleet = SoakFleet(bus, {"lake", "maze"})
    serving = asyncio.create_task(fleet.serve())
    first = SoakLearner(bus, fleet, Ledger(rules), rules, folder, 1)
    await first.run(RENAME_AT)
    renamed = replace(rules, domains=(lake, mine))
    fleet.domains = {"lake", "mine"}
    second = SoakLearner(bus, fleet, Ledger.load(first.boundary), renamed, folder, 2)
    await second.run(STEPS)
    serving.cancel()
    with suppress(asyncio.CancelledError):
        await serving
    counts = second.ledger.counts()
    ended = sum(counts[name] for name in ("trained", "filtered", "dropped", "dead"))
    reasons = dict(sorted(second.ledger.state.reasons.items()))
    days = asyncio.get_running_loop().time() / (24 * HOUR_S)
    shown: dict[str, Any] = {"steps": second.ledger.state.version, "dead": counts["dead"]}
    shown |= {"lost": counts["issued"] - ended, "dropped": counts["dropped"]}
    assert counts["trained"] == STEPS * GROUPS, counts
    return {"soak": shown | {"reasons": reasons, "played": fleet.num_played, "days": round(days, 1)}}


def measure() -> dict[str, Any]:
    """Return the ends of the tickets of a soak in virtual time."""
    with tempfile.TemporaryDirectory() as folder:
        return run(_soak(Path(folder)))
