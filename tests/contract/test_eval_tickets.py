"""Tickets of an evaluation that nobody waits for any more are withdrawn from the broker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import learner_fleet as fleet
from waits import LONG_S, until

from broker.contract import wire
from broker.contract.streams import EVALS, EVALTICKETS
from broker.jetstream.bus import Bus, Delivery
from broker.runtime.process import Stop
from broker.settings.config import DomainSection
from broker.settings.schema.model import ModelSection
from learner.config import EvalSection
from learner.disk_retry import DiskRetry
from learner.evaluation import evaluator as module
from learner.evaluation.evaluation import EvaluationQueue
from learner.evaluation.evaluator import Evaluator
from learner.reporting.transcripts import TranscriptFactory

TASKS = 6


@asynccontextmanager
async def evaluating(bus: Bus, folder: Path, timeout_s: float) -> AsyncIterator[Evaluator]:
    """As the learner opens it."""
    section = EvalSection(tasks=TASKS, every_steps=1, timeout_s=timeout_s)
    evaluations = EvaluationQueue(
        section,
        {"lake": DomainSection(env="lake", deadline_s=60)},
        1,
        await bus.last_seq(EVALTICKETS) + 1,
    )
    made = Evaluator(
        bus,
        evaluations,
        None,
        folder / "evals",
        "",
        DiskRetry(folder, Stop(), "nothing is kept"),
        TranscriptFactory(ModelSection(), folder),
    )  # type: ignore[arg-type]
    await made.open()
    tasks = [asyncio.create_task(work) for work in made.services()]
    try:
        async with asyncio.timeout(LONG_S):
            yield made
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def held(bus: Bus) -> int:
    return sum((await bus.depth(EVALTICKETS)).values())


async def answer(bus: Bus, delivery: Delivery) -> None:
    ticket = delivery.message
    assert isinstance(ticket, wire.EvalTicket)
    own = fleet.trajectory(0, 1.0, ticket.min_version, ticket.number)
    made = fleet.made_up_hub.group(ticket, [own], eval_step=ticket.eval_step, policy=ticket.policy)
    await bus.publish(EVALS, made, ticket=ticket.number)
    await delivery.ack()


async def test_what_an_evaluation_leaves_is_not_played_before_the_next(
    bus: Bus, tmp_path: Path
) -> None:
    queue = await bus.work_queue(EVALTICKETS, "lake")
    async with evaluating(bus, tmp_path, timeout_s=3.0) as made:
        made.start(1, "actor", 1)
        first, second = await queue.fetch(1, LONG_S), await queue.fetch(1, LONG_S)
        await answer(bus, first[0])
        await until(lambda: bool(made.completed))
        assert made.completed[0].closed == {"timeout": TASKS - 1}
        await until_held(bus, 0)
        await answer(bus, second[0])  # whoever held one goes on with it; it counts nothing
        made.start(2, "actor", 2)
        await until_held(bus, TASKS)
        deliveries = await queue.fetch(2 * TASKS, LONG_S)
        while len(deliveries) < TASKS:
            deliveries += await queue.fetch(2 * TASKS, LONG_S)
        assert [one.ticket for one in deliveries] == list(range(TASKS + 1, 2 * TASKS + 1))
        for one in deliveries:
            await answer(bus, one)
        await until(lambda: len(made.completed) == 2)
        assert made.take(last=True)["eval/num_episodes"] == TASKS
        await until(lambda: not made.busy)


async def test_a_learner_that_starts_withdraws_what_an_earlier_one_has_asked_for(
    bus: Bus, tmp_path: Path
) -> None:
    async with evaluating(bus, tmp_path, timeout_s=600.0) as made:
        made.start(1, "actor", 1)
        await until_held(bus, TASKS)
    async with evaluating(bus, tmp_path, timeout_s=600.0) as made:
        assert await held(bus) == 0
        made.start(1, "actor", 1)
        await until_held(bus, TASKS)
        queue = await bus.work_queue(EVALTICKETS, "lake")
        assert (await queue.fetch(1, LONG_S))[0].ticket == TASKS + 1  # no number is used twice


async def until_held(bus: Bus, count: int) -> None:
    async with asyncio.timeout(20 * module.TICK_S):
        while await held(bus) != count:  # noqa: ASYNC110  the broker tells nobody
            await asyncio.sleep(0.05)
