"""The real parts in simulated time: ledger, slots of hubs, their requests, and the scheduler of
every server.
"""

from __future__ import annotations

import asyncio
import random
from array import array
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from bench.tail.scene import (
    GROUP,
    GROUPS,
    LIMIT,
    PROMPT,
    SERVERS,
    SLOTS,
    TASKS,
    Batch,
    Lengths,
    rules,
    throughput,
    train_s,
)
from broker.contract import wire
from broker.settings.config import DomainSection
from envhub.lengths.base import UpcomingTurn
from envhub.lengths.corrections import LengthCalibration
from envhub.lengths.predictor import LengthPredictor
from envhub.lengths.selection import load_estimator, task_key
from envhub.scheduling import slots
from envhub.scheduling.line import GroupJob
from envhub.servers.generate import TurnGenerator
from envhub.servers.turn import TurnRequest
from envhub.tickets.assignment import assignment
from learner.credit.ledger import Action, GroupArrival, IssueTicket, Ledger
from rollout.config import RolloutSection
from rollout.engines.base import EngineStats
from rollout.interval_metrics import IntervalMetrics
from rollout.job_queue import GenerationJob
from rollout.scheduler import Scheduler

HUBS: Final = 2
EPISODES: Final = 512  # that a hub plays at once
PRESENCE_S: Final = 1.0
WEIGHTS_S: Final = 1.0  # from the end of a training step until the servers have its weights


def predictor() -> LengthPredictor:
    """Return the default predictor of a hub that knows nothing yet."""
    choice = load_estimator("tail", DomainSection(env="qa").length_estimator, {})
    return LengthPredictor.of("tail", choice, LengthCalibration())


def prompt(task: int) -> array[int]:
    """Return the first prompt of a task."""
    rng = random.Random(f"prompt {task % TASKS}")
    return array("i", [rng.randrange(30_000) for _ in range(PROMPT)])


class Server:
    """A server whose scheduler is the real one, in front of a simulated batch."""

    def __init__(self, number: int, lengths: Mapping[str, int]) -> None:
        self.id = f"s{number}"
        self._lengths = lengths
        self.scheduler = Scheduler(
            num_slots=SLOTS,
            max_running=SLOTS,
            prefix_cache=False,
            version=0,
            preempt_after_s=RolloutSection().preempt_after_s,
        )
        self._batch = Batch()
        self._replies: dict[int, tuple[GenerationJob, asyncio.Future[wire.GenerateReply]]] = {}
        self._waiting: dict[str, asyncio.Future[wire.GenerateReply]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._finished = 0
        self._meter = IntervalMetrics(0.0)
        self.presence: wire.Presence
        self.beat()

    async def generate(self, request: wire.GenerateRequest) -> wire.GenerateReply:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[wire.GenerateReply] = loop.create_future()
        self._waiting[request.request_id] = answer
        self.scheduler.submit(GenerationJob.of(request, loop.time()))
        self._go_on()
        return await answer

    def serve(self, version: int) -> None:
        """Serve a newer version."""
        self.scheduler.update(version)
        self._go_on()

    def beat(self) -> None:
        """Publish the presence."""
        now = self._batch.now
        batch = self._batch
        stats = EngineStats(
            batch.running, self.scheduler.num_waiting, SLOTS, now, int(batch.tokens)
        )
        self._meter.read(now, stats)
        self.presence = wire.Presence(
            role="rollout", id=self.id, host="here", pid=1, state="serving", address=self.id, slots=SLOTS,
            policy_version=self.scheduler.version, running=batch.running, waiting=self.scheduler.num_waiting,
            speed=self._meter.speed,
        )  # fmt: skip

    def _go_on(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        self._batch.advance(now)
        for slot in self._batch.ended():
            self._end(slot, "stop")
        self._start(now)
        while (yielding := self.scheduler.preempt(now, self._generated)) is not None:
            self._end(yielding.slot, "abort")
            self._start(now)
        if self._timer is not None:
            self._timer.cancel()
        due = self._batch.next_end()
        due = min(due, self.scheduler.next_preemption(now) or due)
        self._timer = loop.call_at(due, self._go_on) if due < float("inf") else None

    def _generated(self, job: GenerationJob) -> int:
        return int(self._batch.grown - self._batch.begun[job.slot])

    def _start(self, now: float) -> None:
        for start in self.scheduler.admit(now):
            job = start.job
            left = self._lengths[job.conversation_id] - (len(job.tokens) - PROMPT)
            self._batch.add(start.slot, left, len(job.tokens))
            self._replies[start.slot] = job, self._waiting.pop(job.request_id)

    def _end(self, slot: int, reason: wire.FinishReason) -> None:
        job, answer = self._replies.pop(slot)
        count = self._batch.remove(slot)
        self.scheduler.finish(slot, None)
        if not answer.done():
            runs = wire.column((self.scheduler.version, count), "<i4")
            answer.set_result(
                wire.GenerateReply(
                    request_id=job.request_id, server=self.id, token_ids=wire.Column("<i4", bytes(4 * count)),
                    logprobs=wire.Column("<f4", bytes(4 * count)), version_runs=runs, finish_reason=reason,
                    policy_version=self.scheduler.version,
                )
            )  # fmt: skip


@dataclass
class Servers:
    """The servers, as request channel and as directory of a hub."""

    servers: dict[str, Server]
    key: str = ""

    def __post_init__(self) -> None:
        self.announce: Callable[[], None] = lambda: None

    async def generate(
        self, address: str, request: wire.GenerateRequest, *, timeout_s: float
    ) -> wire.GenerateReply:
        return await self.servers[address].generate(request)

    async def abort(self, address: str, request_id: str) -> None: ...
    async def forget(self, address: str) -> None: ...
    async def close(self) -> None: ...

    def alive(self, policy: str) -> list[wire.Presence]:
        return [server.presence for server in self.servers.values()]

    def weights(self, policy: str) -> Mapping[str, float]:
        return dict.fromkeys(self.servers, 1.0)

    async def changed(self, timeout_s: float) -> None:
        await asyncio.sleep(timeout_s)


@dataclass
class Hub:
    """Slots and requests of a hub, without environments."""

    fleet: Fleet
    name: str
    tasks: dict[tuple[str, int], asyncio.Task[None]] = field(default_factory=dict)
    tickets: dict[str, wire.Ticket] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.lengths = predictor()
        self.slots = slots.EpisodeSlots(EPISODES, 3)
        loop = asyncio.get_running_loop()
        servers = self.fleet.servers
        self.generator = TurnGenerator(
            servers, servers, name=self.name, max_retries=3, clock=loop.time
        )
        self.generator._rng.seed(self.name)

    def offer(self, ticket: wire.Ticket) -> None:
        key = str(ticket.number)
        self.tickets[key] = ticket
        self.slots.release(ticket.group_size, 1)
        job = GroupJob(key, ticket.group_size, ticket.min_group_size, 1e9)
        self.perform(self.slots.offer(job, 0.0))

    def perform(self, actions: list[slots.Action]) -> None:
        for action in actions:
            match action:
                case slots.StartEpisode(key, episode, _):
                    self.tasks[key, episode] = asyncio.create_task(self.play(key, episode))
                case slots.HurryEpisode(key, episode):
                    self.generator.hurry(f"{key}.{episode}")
                case slots.FinishGroup(key, _):
                    self.fleet.finished(self.tickets.pop(key))
                case _:
                    raise AssertionError(action)

    async def play(self, key: str, episode: int) -> None:
        ticket = self.tickets[key]
        fleet = self.fleet
        name = f"{key}.{episode}"
        fleet.lengths_of[name] = fleet.lengths.of(ticket.task_index, ticket.number, episode)
        context = prompt(ticket.task_index)
        step = -1
        key_of_task = task_key(context)
        predicted = self.lengths.predict(
            UpcomingTurn(context, LIMIT, key_of_task, task_index=ticket.task_index)
        )
        expected = predicted.expected
        high = predicted.high
        if fleet.predicts:
            step = assignment(ticket).step(GROUPS)
        else:
            expected = high = 0
        sampled = await self.generator.turn(
            TurnRequest(
                conversation_id=name, episode=name, token_ids=context,
                sampling=wire.SamplingParams(max_tokens=LIMIT), min_version=ticket.min_version, timeout_s=1e5,
                expected_tokens=expected, expected_high=high, step=step,
            )
        )  # fmt: skip
        del fleet.lengths_of[name]
        self.generator.forget(name)
        self.lengths.add(predicted, len(sampled.token_ids))
        del self.tasks[key, episode]
        self.perform(self.slots.finished(key, episode))
        fleet.deal()


class Fleet:
    """Learner, hubs and servers."""

    def __init__(self, lengths: Lengths, max_staleness: int, *, predicts: bool) -> None:
        self.lengths = lengths
        self.predicts = predicts
        self.lengths_of: dict[str, int] = {}
        self.ledger = Ledger(rules(max_staleness))
        self.servers = Servers(
            {f"s{number}": Server(number, self.lengths_of) for number in range(SERVERS)}
        )
        self.hubs = [Hub(self, f"hub{number}") for number in range(HUBS)]
        self.queue: deque[wire.Ticket] = deque()
        self.log: list[int] = []
        self._grown = asyncio.Event()
        self.ends: list[float] = []

    async def run(self) -> float:
        """Train every step and return the steps per second."""
        loop = asyncio.get_running_loop()
        beats = asyncio.create_task(self._beat())
        self._perform(self.ledger.open_credit())
        position = 0
        while not self.ledger.done:
            if self.ledger.full:
                await asyncio.sleep(train_s())
                self.ends.append(loop.time())
                self._perform(self.ledger.complete_step())
                loop.call_later(WEIGHTS_S, self._serve, self.ledger.state.version)
            elif position < len(self.log):
                arrival = GroupArrival(self.log[position], self.ledger.state.version, (0.0, 1.0))
                position += 1
                self._perform(self.ledger.apply(arrival, position))
            else:
                self._grown.clear()
                await self._grown.wait()
        beats.cancel()
        return throughput(self.ends)

    def finished(self, ticket: wire.Ticket) -> None:
        self.log.append(ticket.number)
        self._grown.set()

    def deal(self) -> None:
        """Let hubs with room take tickets in order, one each in turn."""
        while self.queue:
            room = [hub for hub in self.hubs if hub.slots.free >= GROUP]
            if not room:
                return
            hub = max(room, key=lambda one: one.slots.free)
            assert hub.slots.reserve(GROUP, 1)
            hub.offer(self.queue.popleft())

    def _perform(self, actions: list[Action]) -> None:
        self.queue.extend(action.ticket for action in actions if isinstance(action, IssueTicket))
        self.deal()

    def _serve(self, version: int) -> None:
        for server in self.servers.servers.values():
            server.serve(version)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(PRESENCE_S)
            for server in self.servers.servers.values():
                server.beat()
