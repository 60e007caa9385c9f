"""Weeks of a run in virtual time: the real ledger, issuer, reaper and evaluator, with a simulated
fleet and trainer.

1,000 steps of 20 minutes on two domains whose groups are scored by reward hubs: with pauses of 8
hours, hubs and reward hubs that are away for a day, scoring that is slower than playing, one domain
renamed on a resume, and hubs that freeze every few hours. The same numbers every time.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from bench.scale.virtual import MemoryBus, run
from bench.scale.virtual_fleet import LOOK_S, SCORE_S, SoakFleet, SoakRewards
from broker.contract import wire
from broker.contract.streams import EVALTICKETS, SAMPLES, TICKETS
from broker.runtime.process import Stop
from broker.settings.config import DomainSection
from broker.settings.schema.model import ModelSection
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
HOUR_S: Final = 3_600.0
PAUSE_AT: Final = (100, 101, 400, 800)  # steps behind which the operator pauses the run for 8 hours
AWAY_AT: Final = (250, 700)  # steps behind which every hub is away for a day
REWARDS_AWAY_AT: Final = (350,)  # steps behind which every reward hub is away for REWARD_OUTAGE_H
REWARD_OUTAGE_H: Final = 24.0
SLOW_AT: Final = (550, 600)  # first and last step with scoring that is slower than playing
SLOW_SCORE_S: Final = 120.0  # 120 groups an hour, where hubs play 180
PAUSE_EVERY_S: Final = 5 * HOUR_S  # from one frozen hub to the next
FROZEN_S: Final = (10.0, 5_400.0)
RENAME_AT: Final = 500
TIMEOUT_S: Final = 1_800.0  # of a ticket
POOL: Final = "judge"


class SoakLearner:
    """The learner's loop around the real ledger: records in, a step of 20 minutes whenever one is
    full.
    """

    def __init__(
        self,
        bus: MemoryBus,
        fleet: SoakFleet,
        ledger: Ledger,
        rules: TicketRules,
        folder: Path,
        epoch: int,
    ) -> None:
        self.bus = bus
        self.fleet = fleet
        self.ledger = ledger
        self.rules = rules
        self.epoch = epoch
        self.paused = False
        around: Any = bus
        self.issuer = TicketIssuer(around, TICKETS)
        roster: Any = fleet
        pools = {rule.name: fleet.pools for rule in rules.domains}
        self.reaper = TicketReaper(
            around, ledger, roster, TIMEOUT_S, lambda: self.paused, pools=pools, every_s=LOOK_S
        )
        domains = {
            rule.name: DomainSection(env="frozenlake", deadline_s=600.0) for rule in rules.domains
        }
        section = EvalSection(every_steps=50, tasks=16, at_start=False, timeout_s=3_600.0)
        evaluations = EvaluationQueue(
            section, domains, 0, first_number=bus._last.get(EVALTICKETS.name, 0) + 1
        )
        patience = DiskRetry(folder, Stop(), "the soak")
        self.evaluator = Evaluator(
            around,
            evaluations,
            roster,
            folder,
            "",
            patience,
            TranscriptFactory(ModelSection(), folder),
            every_s=LOOK_S,
        )
        self.boundary = ledger.dump()
        self.slowest_wait_s = 0.0  # the longest time in the reward queue while scoring was slow

    async def run(self, until: int) -> None:
        """Make steps up to ``until``; return between two steps."""
        change = wire.RulesChange(epoch=self.epoch, rules=self.rules.plain())
        await self.bus.publish(SAMPLES, change)
        for number in range(await self.bus.last_seq(TICKETS) + 1, self.ledger.state.issued + 1):
            # what the last life granted and did not publish, as in learner.credit.recovery
            self.issuer.put(self.ledger.ticket(number))
        self._perform(self.ledger.open_credit())
        work = (
            self._read(until),
            self.issuer.serve(),
            self.reaper.serve(),
            *self.evaluator.services(),
        )
        tasks = [asyncio.create_task(one) for one in work]
        # only the reading ends by itself
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            task.result()

    async def _read(self, until: int) -> None:
        async for entry in self.bus.read_log(SAMPLES, self.ledger.state.position + 1):
            self._perform(
                self.ledger.apply(
                    record_intake.read_record(entry, self.ledger, 10).record, entry.seq
                )
            )
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
        if (rewards := self.fleet.rewards) is not None:
            if step in REWARDS_AWAY_AT:
                rewards.leave(REWARD_OUTAGE_H * HOUR_S)
            rewards.score_s = SLOW_SCORE_S if SLOW_AT[0] <= step < SLOW_AT[1] else SCORE_S
            if step == SLOW_AT[0]:
                rewards.longest_wait_s = 0.0
            elif step == SLOW_AT[1]:
                self.slowest_wait_s = rewards.longest_wait_s

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, IssueTicket):
                self.issuer.put(action.ticket)
            elif isinstance(action, ForgetTicket):
                self.issuer.withdraw(action.number)


async def _freeze_hubs(fleet: SoakFleet, rewards: SoakRewards) -> None:
    """Freeze one hub after the other, and every tenth time the reward hubs."""
    chance = random.Random(1)
    for number in itertools.count():
        await asyncio.sleep(PAUSE_EVERY_S)
        if number % 10 == 9:
            rewards.freeze(chance.uniform(*FROZEN_S))
        else:
            fleet.freeze(number, chance.uniform(*FROZEN_S))


async def _soak(folder: Path) -> dict[str, Any]:
    lake, maze, mine = (DomainRule(name, 1.0, 8, 1, 600.0) for name in ("lake", "maze", "mine"))
    rules = TicketRules(STEPS, GROUPS, STALENESS, "wait", 0, (lake, maze))
    bus = MemoryBus("soak", "learner")
    fleet = SoakFleet(bus, {"lake", "maze"}, [POOL])
    rewards = SoakRewards(bus, POOL)
    fleet.rewards = rewards
    serving = [
        asyncio.create_task(one)
        for one in (fleet.serve(), rewards.serve(), _freeze_hubs(fleet, rewards))
    ]
    first = SoakLearner(bus, fleet, Ledger(rules), rules, folder, 1)
    await first.run(RENAME_AT)
    renamed = replace(rules, domains=(lake, mine))
    fleet.domains = {"lake", "mine"}
    second = SoakLearner(bus, fleet, Ledger.load(first.boundary), renamed, folder, 2)
    await second.run(STEPS)
    for task in serving:
        task.cancel()
    await asyncio.gather(*serving, return_exceptions=True)
    counts = second.ledger.counts()
    ended = sum(counts[name] for name in ("trained", "filtered", "dropped", "dead"))
    reasons = dict(sorted(second.ledger.state.reasons.items()))
    days = asyncio.get_running_loop().time() / (24 * HOUR_S)
    shown: dict[str, Any] = {"steps": second.ledger.state.version, "dead": counts["dead"]}
    shown |= {
        "lost": counts["issued"] - ended,
        "dropped": counts["dropped"],
        "duplicate": counts["duplicate"],
    }
    shown |= {
        "reward_outage_h": REWARD_OUTAGE_H if REWARDS_AWAY_AT else 0.0,
        "hub_pauses": fleet.num_pauses,
    }
    shown["slow_scoring"] = max(first.slowest_wait_s, second.slowest_wait_s) > TIMEOUT_S
    assert counts["trained"] == STEPS * GROUPS, counts
    return {
        "soak": shown | {"reasons": reasons, "played": fleet.num_played, "days": round(days, 1)}
    }


def measure() -> dict[str, Any]:
    """Return the ends of the tickets of a soak in virtual time."""
    with tempfile.TemporaryDirectory() as folder:
        return run(_soak(Path(folder)))
