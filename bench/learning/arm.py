"""Run one algorithm over the real ledger, with every group trained exactly ``max_staleness``
versions late.

The ledger grants tickets for ``max_staleness`` versions ahead. Each is played as soon as it is
granted, by the weights of that moment, and its group waits in the log: the group granted at version
v is trained in step v + max_staleness. Before step ``max_staleness`` groups are as late as
possible: there is no version before 0.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from bench.learning.play import InlineHub
from broker.contract import codec, wire
from broker.errors import UserError
from broker.jetstream.bus import LogRecord
from broker.settings.registry import resolve
from broker.settings.run_settings import RunSettings
from envhub.tickets.assignment import assignment
from learner.algorithm.advantages import ADVANTAGES
from learner.algorithm.episodes import episode_rewards
from learner.backends import BACKENDS
from learner.credit import record_intake
from learner.credit.ledger import Action, ForgetTicket, HoldGroup, IssueTicket, Ledger, TakeGroup
from learner.credit.task_sources import TaskSources
from learner.credit.ticket_rules import rules_of
from learner.evaluation.evaluation import EvaluationQueue
from learner.training import TrainingThread
from learner.weights.probing import WeightProbe

SHOWN = (
    *("actor/grad_norm", "actor/entropy", "actor/pg_clipfrac", "actor/ppo_kl"),
    *("rollout_corr/ess", "rollout_corr/masked_fraction"),
)


class TrainingArm:
    """Learner and engine of one run that starts from ``model_path``.

    Attributes:
        curve: mean reward of the groups of each step, as sampled.
        lateness: versions between sampling and training, (oldest, newest) of each step.
    """

    def __init__(self, config: dict[str, Any], model_path: str) -> None:
        self._path = model_path
        settings = RunSettings.of_config(config)
        self._train = settings.train
        self._algorithm = settings.algorithm
        self._model = settings.model
        self._domains = settings.domains
        self._seed = settings.run.seed
        self._evaluation = settings.eval
        tasks = TaskSources(settings).rules
        self.ledger = Ledger(
            rules_of(self._train, self._algorithm, self._domains, self._seed, tasks)
        )
        self.hub = InlineHub(config, model_path)
        self._granted: list[wire.Ticket] = []
        self._log: deque[LogRecord] = deque()
        self._sequence = 0
        self._held: dict[int, wire.Group] = {}
        self._taken: list[wire.Group] = []
        self.curve: list[float] = []
        self.lateness: list[tuple[int, int]] = []
        self.lines: list[dict[str, float]] = []

    async def run(self) -> None:
        self._training = training = self._open()
        try:
            self._backend = await training.open()
            self._perform(self.ledger.open_credit())
            while not self.ledger.done:
                if self.ledger.full:
                    await self._step()
                else:
                    if not self._log:
                        await self._play()  # the first ones, and replacements
                    self._take_in(self._log.popleft())
        finally:
            await asyncio.to_thread(training.close)

    async def success(self) -> list[int]:
        """Return solved episodes of each held-out task with the current weights."""
        evaluations = EvaluationQueue(self._evaluation, self._domains, self._seed)
        tickets = evaluations.start(self.hub.version, "actor", self.hub.version, 0.0)
        finished = None
        for group in await self.hub.play([assignment(ticket) for ticket in tickets]):
            finished = evaluations.apply(group)
        assert finished is not None
        return [
            sum(one.successes)
            for one in sorted(finished.measured, key=lambda one: (one.domain, one.task_index))
        ]

    def _open(self) -> TrainingThread:
        build = partial(
            resolve("backends", self._train.backend, BACKENDS),
            self._path,
            train=self._train,
            algorithm=self._algorithm,
            model=self._model,
            seed=self._seed,
            ref_path=self._path,
            max_length=max(domain.max_context_tokens for domain in self._domains.values()),
        )
        estimator = resolve("advantages", self._algorithm.adv_estimator, ADVANTAGES)
        return TrainingThread(build, estimator, self._algorithm)

    async def _play(self) -> None:
        """Play what has been granted; the records stand in the log in the order of the tickets."""
        tickets = self._granted
        self._granted = []
        for group in (
            await self.hub.play([assignment(ticket) for ticket in tickets]) if tickets else []
        ):
            self._sequence += 1
            data = codec.encode(group)
            self._log.append(
                LogRecord(self._sequence, codec.decode(data, wire.Group), "", group.ticket, data)
            )

    def _take_in(self, entry: LogRecord) -> None:
        read = record_intake.read_record(entry, self.ledger, self._backend.vocab_size)
        if read.problem:
            raise UserError(f"record {entry.seq}: {read.problem}")
        actions = self.ledger.apply(read.record, entry.seq)
        if read.group is not None and any(isinstance(action, HoldGroup) for action in actions):
            self._held[read.group.ticket] = read.group
        self._perform(actions)

    def _perform(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, IssueTicket):
                self._granted.append(action.ticket)
            elif isinstance(action, TakeGroup):
                group = self._held.pop(action.number)
                self._taken.append(group)
                self._training.add(group)
            elif isinstance(action, ForgetTicket):
                self._held.pop(action.number, None)

    async def _step(self) -> None:
        await self._play()  # replacements, by the version that they were granted at
        version = self.ledger.state.version
        trained = await self._training.finish(version)
        assert trained is not None
        oldest, newest = record_intake.version_bounds(self._taken) or (version, version)
        self.lateness.append((version - oldest, version - newest))
        self.curve.append(
            float(np.mean([reward for group in self._taken for reward in episode_rewards(group)]))
        )
        self.lines.append(trained.values)
        self._taken = []
        actions = self.ledger.complete_step()
        check = await self._training.call(WeightProbe(self._backend, self._model.dtype).make)
        self.hub.update(self._backend.weights(), self.ledger.state.version, check)
        self._perform([action for action in actions if isinstance(action, IssueTicket)])
        # before anything of the next step is trained: one core, and the version of the grant
        await self._play()
        self._perform([action for action in actions if not isinstance(action, IssueTicket)])


def run_arm(config: dict[str, Any], model_path: str) -> dict[str, Any]:
    began = time.monotonic()
    cpu = time.process_time()
    arm = TrainingArm(config, model_path)

    async def work() -> list[int]:
        await arm.run()
        return await arm.success()

    solved = asyncio.run(work())
    figures: dict[str, Any] = {"solved": solved, "episodes_per_map": config["eval"]["group_size"]}
    figures |= {"curve": [round(value, 4) for value in arm.curve], "lateness": arm.lateness}
    figures |= {"tickets": arm.ledger.counts()}
    figures |= {"first": {name: arm.lines[0][name] for name in SHOWN if name in arm.lines[0]}}
    figures |= {"last": {name: arm.lines[-1][name] for name in SHOWN if name in arm.lines[-1]}}
    return figures | {
        "seconds": round(time.monotonic() - began, 2),
        "cpu_s": round(time.process_time() - cpu, 2),
    }


def measure(config: dict[str, Any], model_path: str) -> dict[str, Any]:
    async def work() -> list[int]:
        return await TrainingArm(config, model_path).success()

    return {"solved": asyncio.run(work()), "episodes_per_map": config["eval"]["group_size"]}
