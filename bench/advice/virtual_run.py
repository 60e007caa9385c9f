"""Runs a simulated fleet in virtual time with the real ledger, slots, choice of servers and
metrics.

Only what takes time is simulated: sampling, environments, rewards, training. There are no delays of
messages.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from typing import Any, Final

from bench.advice.paced import PacedQueue
from bench.advice.speeds import FleetSpeeds
from bench.scale.virtual import MemoryBus, run
from broker.contract import wire
from broker.contract.streams import SAMPLES, TICKETS
from broker.runtime.load_curve import LoadCurve
from broker.settings.run_settings import RunSettings
from envhub.scheduling import slots
from envhub.scheduling.line import GroupJob
from envhub.servers.choose import ServerLoad, choose
from envhub.servers.turn import mix
from learner.credit.ledger import Action, IssueTicket, Ledger, TakeGroup
from learner.credit.record_intake import read_record
from learner.credit.ticket_rules import DomainRule, TicketRules
from learner.reporting.fleet_figures import NAMES, fleet_figures
from learner.reporting.metrics import step_metrics

DOMAIN: Final = "simulated"
VOCABULARY: Final = 64


def run_fleet(speeds: FleetSpeeds, steps: int) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl of a run."""
    return run(VirtualRun(speeds, steps).run())


def settings_of(speeds: FleetSpeeds, steps: int) -> RunSettings:
    """Return the settings of a run that its metrics are read with."""
    domain: dict[str, Any] = {
        "env": "simulated",
        "group_size": speeds.group_size,
        "group_size_redundancy": speeds.redundancy,
    }
    train: dict[str, Any] = {
        "steps": steps,
        "groups_per_step": speeds.groups_per_step,
        "max_staleness": speeds.max_staleness,
    }
    domain |= {"score_ahead": False, "rewards": [{"name": "simulated"}] if speeds.score_s else []}
    algorithm = {"adv_estimator": "grpo", "filter_zero_variance": speeds.equal_rewards > 0}
    sections = {"train": train, "domains": {DOMAIN: domain}, "algorithm": algorithm}
    return RunSettings.of_config(sections)


@dataclass
class _Server:
    queue: PacedQueue
    curve: LoadCurve
    number: int


@dataclass
class _Held:
    ticket: wire.Ticket
    played: dict[int, tuple[wire.Trajectory, float, float]] = field(default_factory=dict)
    tasks: dict[int, asyncio.Task[None]] = field(default_factory=dict)


class VirtualRun:
    """The processes of one run."""

    def __init__(self, speeds: FleetSpeeds, steps: int) -> None:
        self.speeds = speeds
        self.steps = steps
        rule = DomainRule(
            DOMAIN, 1.0, speeds.group_size, speeds.group_size, 1e6, num_redundant=speeds.redundancy
        )
        self.ledger = Ledger(
            TicketRules(
                steps,
                speeds.groups_per_step,
                speeds.max_staleness,
                "wait",
                0,
                (rule,),
                filter_zero_variance=speeds.equal_rewards > 0,
                max_replacements_per_step=1 << 20,
            )
        )
        self.bus = MemoryBus("advice", "learner")
        paced = [
            PacedQueue(speeds.slots, speeds.token_s, speeds.token_each_s)
            for _ in range(speeds.servers)
        ]
        self.servers = [
            _Server(one, LoadCurve(lambda: speeds.slots), index) for index, one in enumerate(paced)
        ]
        self.env_curve = [LoadCurve(lambda: 1 << 30) for _ in range(speeds.hubs)]
        self.score_curve = [LoadCurve(lambda: speeds.workers) for _ in range(speeds.reward_hubs)]
        self.workers = [asyncio.Semaphore(speeds.workers) for _ in range(speeds.reward_hubs)]
        self.scoring = [0] * speeds.reward_hubs
        self.issued = asyncio.Event()
        self.rng = random.Random(0)
        self.rows: list[dict[str, Any]] = []
        self.groups: dict[int, wire.Group] = {}
        self.training: list[wire.Group] = []
        self.todo: asyncio.Queue[wire.Group] = asyncio.Queue()
        self.busy_s = 0.0
        self.filtered = 0

    async def run(self) -> list[dict[str, Any]]:
        work = [asyncio.create_task(self._hub(number)) for number in range(self.speeds.hubs)]
        work.append(asyncio.create_task(self._train_on_groups()))
        try:
            await self._learn()
        finally:
            for task in work:
                task.cancel()
            await asyncio.gather(*work, return_exceptions=True)
        return self.rows

    # -- learner

    async def _learn(self) -> None:
        await self._perform(self.ledger.open_credit())
        self.began = self._now()
        async for entry in self.bus.read_log(SAMPLES, 1):
            read = read_record(entry, self.ledger, VOCABULARY)
            if read.group is not None:
                self.groups[read.group.ticket] = read.group
            await self._perform(self.ledger.apply(read.record, entry.seq))
            while self.ledger.full:
                await self._step()
            if self.ledger.done:
                return

    async def _train_on_groups(self) -> None:
        while True:
            group = await self.todo.get()
            seconds = self.speeds.sample_s * len(group.trajectories)
            await asyncio.sleep(seconds)
            self.busy_s += seconds
            self.training.append(group)
            self.todo.task_done()

    async def _step(self) -> None:
        waited_s = self._now() - self.began
        await self.todo.join()
        await asyncio.sleep(self.speeds.step_s)
        groups = self.training
        self.training = []
        version = self.ledger.state.version
        busy_s = self.busy_s + self.speeds.step_s
        self.busy_s = 0.0
        await self._perform(self.ledger.complete_step())
        now = self._now()
        wall_s = now - self.began
        self.began = now
        samples = sum(len(group.trajectories) for group in groups)
        filtered = self.ledger.counts()["filtered"]
        line = {
            "step": version + 1,
            "time": now,
            "time/step": wall_s,
            "time/wait_for_batch": waited_s,
        }
        line |= {
            "time/train": busy_s,
            "time/finish_train": self.speeds.step_s,
            "time/publish_step": 0.0,
        }
        line |= {
            "time/between_steps": 0.0,
            "perf/samples_per_s": samples / wall_s,
            "filter/count": float(filtered - self.filtered),
        }
        self.filtered = filtered
        line |= {"trainer/idle_ratio": 1 - busy_s / wall_s}
        self.rows.append(step_metrics(groups, version) | line | self._fleet())

    async def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, IssueTicket):
                await self.bus.publish(TICKETS, action.ticket, key=DOMAIN)
            elif isinstance(action, TakeGroup):
                self.todo.put_nowait(self.groups.pop(action.number))
        issued = self.issued
        self.issued = asyncio.Event()
        issued.set()

    def _fleet(self) -> dict[str, float]:
        speeds = self.speeds
        curves = {
            "rollout": [one.curve for one in self.servers],
            "envhub": self.env_curve,
            "rewardhub": self.score_curve,
        }
        of_role = {"rollout": speeds.slots, "envhub": speeds.envs, "rewardhub": 0}
        values: dict[str, float] = {}
        for role in NAMES:
            present = [
                wire.Presence(
                    role=role, id=str(number), host="", pid=1, state="serving", slots=of_role[role],
                    at_once=speeds.workers if role == "rewardhub" else 0, base_s=fitted[0], each_s=fitted[1],
                )
                for number, fitted in enumerate(curve.fit() for curve in curves[role])
            ]  # fmt: skip
            values |= fleet_figures(role, present)
        return values

    # -- environment hub

    async def _hub(self, number: int) -> None:
        hub = slots.EpisodeSlots(self.speeds.envs, 0)
        held = dict[str, _Held]()
        changed = asyncio.Event()

        def perform(actions: list[slots.Action]) -> None:
            for action in actions:
                one = held[action.key]
                match action:
                    case slots.StartEpisode(key, episode, _):
                        one.tasks[episode] = asyncio.create_task(play(key, episode))
                    case slots.HurryEpisode():
                        pass  # these servers know no priorities
                    case slots.AbortEpisode(_, episode):
                        one.tasks.pop(episode).cancel()
                    case slots.FinishGroup(key, episodes):
                        del held[key]
                        asyncio.get_running_loop().create_task(self._score(one, episodes))
                    case _:
                        raise AssertionError(action)
            changed.set()

        async def play(key: str, episode: int) -> None:
            one = held[key]
            one.played[episode] = await self._play(number, one.ticket, episode)
            one.tasks.pop(episode, None)
            perform(hub.finished(key, episode))

        need = self.speeds.group_size + self.speeds.redundancy
        while True:
            issued = self.issued
            changed.clear()
            while hub.reserve(need, 1):
                ticket = self.bus.take(TICKETS, DOMAIN)
                hub.release(need, 1)
                if not isinstance(ticket, wire.Ticket):
                    break
                key = str(ticket.number)
                held[key] = _Held(ticket)
                job = GroupJob(
                    key,
                    ticket.group_size,
                    ticket.min_group_size,
                    1e6,
                    num_redundant=ticket.num_redundant,
                )
                perform(hub.offer(job, self._now()))
                await asyncio.sleep(0)  # so that several hubs take turns
            waits = [asyncio.create_task(event.wait()) for event in (issued, changed)]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()

    async def _play(
        self, hub: int, ticket: wire.Ticket, episode: int
    ) -> tuple[wire.Trajectory, float, float]:
        speeds = self.speeds
        sticky = ""
        generate_s = 0.0
        env_s = 0.0
        turns: list[wire.Turn] = []
        for turn in range(speeds.turns):
            seed = mix(ticket.seed, episode, turn)
            tokens = speeds.tokens(seed, ticket.seed)
            began = self._now()
            sticky = await self._generate(tokens, sticky)
            generate_s += self._now() - began
            start = turns[-1].end if turns else 1
            turns.append(
                wire.Turn(
                    start=start, end=start + tokens, reward=0.0, valid=True, finish_reason="stop", server=sticky
                )
            )  # fmt: skip
            if speeds.env_s:
                began = self._now()
                piece = self.env_curve[hub].enter(began)
                await asyncio.sleep(speeds.env_step(seed))
                self.env_curve[hub].leave(piece, self._now(), 1)
                env_s += self._now() - began
        total = turns[-1].end - 1
        trajectory = wire.Trajectory(
            episode=episode,
            token_ids=wire.column([1] * (total + 1), "<i4"),
            loss_mask=wire.column([0] + [1] * total, "|u1"),
            logprobs=wire.column([0.0] * (total + 1), "<f4"),
            version_runs=wire.column([ticket.min_version, total], "<i4"),
            turns=turns,
            reward=0.0 if speeds.has_equal_rewards(ticket.seed) else float(episode % 2),
            reward_parts={},
            success=False,
            end="terminated",
        )
        return trajectory, generate_s, env_s

    async def _generate(self, tokens: int, sticky: str) -> str:
        there = [
            ServerLoad(
                str(one.number), "", 0, one.queue.slots, one.queue.running + one.queue.waiting
            )
            for one in self.servers
        ]
        chosen = choose(there, self.rng, sticky=sticky)
        assert chosen is not None
        server = self.servers[int(chosen.id)]
        piece = server.curve.enter(self._now())
        done = 0
        try:
            await server.queue.serve(tokens)
            done = tokens
        finally:
            server.curve.leave(piece, self._now(), done)
        return chosen.id

    # -- reward hub

    async def _score(self, held: _Held, episodes: tuple[int, ...]) -> None:
        began = self._now()
        played = [held.played[episode] for episode in episodes]
        if self.speeds.score_s:
            hub = min(range(len(self.scoring)), key=self.scoring.__getitem__)
            self.scoring[hub] += 1
            await asyncio.gather(*(self._score_one(hub) for _ in played))
            self.scoring[hub] -= 1
        ticket = held.ticket
        group = wire.Group(
            ticket=ticket.number,
            domain=ticket.domain,
            task_index=ticket.task_index,
            min_version=ticket.min_version,
            hub="hub",
            deliveries=1,
            pools=[],
            trajectories=[trajectory for trajectory, _, _ in played],
            generate_s=sum(one[1] for one in played) / len(played),
            env_step_s=sum(one[2] for one in played) / len(played),
            env_step_max_s=max(one[2] for one in played),
            reward_s=self._now() - began,
        )
        await self.bus.publish(SAMPLES, group, ticket=ticket.number)

    async def _score_one(self, hub: int) -> None:
        piece = self.score_curve[hub].enter(self._now())
        async with self.workers[hub]:
            await asyncio.sleep(self.speeds.score_s)
        self.score_curve[hub].leave(piece, self._now(), 1)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
