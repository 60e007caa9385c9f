"""A made-up fleet for tests of the learner: answers tickets with groups that a real model never
sampled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from bench.support import made_up_hub
from broker.contract import wire
from broker.contract.streams import EVALS, EVALTICKETS, SAMPLES, TICKETS
from broker.jetstream.bus import Bus, Delivery
from broker.settings.runspec import validate

PROMPT, RESPONSE = 5, 3
TINY = {
    "hidden_size": 16,
    "num_layers": 1,
    "num_heads": 1,
    "num_kv_heads": 1,
    "head_dim": 16,
    "intermediate_size": 32,
}


def config(folder: str, name: str, **sections: dict[str, Any]) -> dict[str, Any]:
    """A small run on one domain, checked."""
    lake = {
        "env": "frozenlake",
        "group_size": 2,
        "max_turns": 4,
        "max_context_tokens": 64,
        "deadline_s": 20,
        "sampling": {"max_tokens": 4},
    }
    merged: dict[str, Any] = {
        "run": {"name": name, "dir": folder, "seed": 3},
        "model": {"path": None, "tiny": TINY},
        "domains": {"lake": lake},
        "train": {
            "steps": 3,
            "groups_per_step": 2,
            "micro_batch_tokens": 64,
            "lr": 1e-3,
            "num_threads": 1,
            "ticket_timeout_s": 60.0,
        },
        "rollout": {"max_context_tokens": 64},
    }
    for section, values in sections.items():
        merged[section] = {**merged.get(section, {}), **values}
    return validate(merged)


def trajectory(episode: int, reward: float, version: int, seed: int) -> wire.Trajectory:
    """Five tokens of prompt, three sampled ones in one turn."""
    rng = np.random.default_rng([seed, episode])
    n = PROMPT + RESPONSE
    turn = wire.Turn(
        start=PROMPT,
        end=n,
        reward=reward,
        valid=episode == 0,
        finish_reason="stop",
        server="made-up",
    )
    return made_up_hub.trajectory(
        episode, rng.integers(6, 60, n).tolist(), [-2.0] * RESPONSE, version=version, reward=reward, turns=[turn],
        metrics={"moves": 2.0 + episode},
    )  # fmt: skip


def group(ticket: wire.Ticket, version: int, rewards: tuple[float, ...] = (0.0, 1.0)) -> wire.Group:
    """The group of a ticket, all its tokens of one version."""
    trajectories = [
        trajectory(i, reward, version, ticket.number) for i, reward in enumerate(rewards)
    ]
    return made_up_hub.group(ticket, trajectories, generate_s=0.5, env_step_s=0.25)


class Hub:
    """Takes tickets as they come and stores what ``answer`` makes of each: messages, or raw bytes."""

    def __init__(
        self,
        bus: Bus,
        answer: Callable[[wire.Ticket], list[wire.Message | bytes]],
        *,
        domains: Sequence[str] = ("lake",),
        work_s: float = 0.0,
    ) -> None:
        self.bus, self.answer, self.domains, self.work_s = bus, answer, domains, work_s
        self.tickets: list[wire.Ticket] = []
        self.eval_tickets: list[wire.EvalTicket] = []
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Hub:
        self._task = asyncio.create_task(self._serve())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        if not self._task.cancelled() and (error := self._task.exception()):
            raise error

    async def _serve(self) -> None:
        await asyncio.gather(*(self._train(domain) for domain in self.domains), self._evaluate())

    async def _train(self, domain: str) -> None:
        queue = await self.bus.work_queue(TICKETS, domain)
        while True:
            for delivery in await queue.fetch(1, 5.0):
                assert isinstance(delivery.message, wire.Ticket)
                self.tickets.append(delivery.message)
                await asyncio.sleep(self.work_s)
                for one in self.answer(delivery.message):
                    await self.store(delivery, one)
                await delivery.ack()

    async def store(self, delivery: Delivery, one: wire.Message | bytes) -> None:
        if isinstance(one, bytes):
            await self.bus.link.send(
                SAMPLES.subject(self.bus.run),
                one,
                headers={wire.TICKET_HEADER: str(delivery.ticket)},
            )
        else:
            await self.bus.publish(SAMPLES, one, ticket=getattr(one, "ticket", 0))

    async def _evaluate(self) -> None:
        queue = await self.bus.work_queue(EVALTICKETS, "lake")
        while True:
            for delivery in await queue.fetch(1, 5.0):
                ticket = delivery.message
                assert isinstance(ticket, wire.EvalTicket)
                self.eval_tickets.append(ticket)
                # every other held-out task succeeds
                own = trajectory(0, float(ticket.task_index % 2), ticket.min_version, ticket.number)
                answer = made_up_hub.group(
                    ticket, [own], eval_step=ticket.eval_step, policy=ticket.policy
                )
                await self.bus.publish(EVALS, answer, ticket=ticket.number)
                await delivery.ack()
