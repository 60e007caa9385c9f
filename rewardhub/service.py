"""Runs a reward hub: takes groups from its pools' queues, and publishes scored groups or closings.

Delivery is at-least-once. A group is acknowledged only after its result is stored; if the hub dies
before, the group is delivered again, to it or to another hub. The learner counts the first record
of a ticket.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import msgspec

from broker.contract import wire
from broker.contract.streams import EPISODES, RERUNS
from broker.errors import TooLarge, UserError, WireError, described
from broker.jetstream.bus import Delivery
from broker.jetstream.core_messages import answer_requests
from broker.jetstream.pulling import fetch_unless
from broker.jetstream.ticket_results import close_ticket, ticket_key
from broker.nats.subscription import LinkSubscription
from broker.runtime.process import Member, Stop, join
from broker.runtime.work_health import WorkHealth
from broker.settings.config import RewardConfig
from broker.system import gpus
from broker.system.batch_job import batch_job
from rewardhub.config import all_pools, own_pools, pools_of_kinds
from rewardhub.function_pool import FunctionPool
from rewardhub.metrics import RewardhubMetrics
from rewardhub.pool_trials import PoolTrials
from rewardhub.routing import CloseAction, ForwardAction, GroupScoring, find_refusal
from rewardhub.score_ahead import AheadScorer
from rewardhub.score_dispatcher import ScoreDispatcher
from rewardhub.scoring_job import rescore_group, score_group
from rewardhub.worker_pool import NoWorkerError

log = logging.getLogger(__name__)

TICK_S: Final = 0.25
HAND_BACK_S: Final = 2.0  # before a group that cannot be scored here is delivered again


@dataclass
class _Job:
    """A group in progress."""

    pool: str
    delivery: Delivery
    began: float = field(default_factory=time.monotonic)
    task: asyncio.Task[None] | None = None
    is_scored: bool = False


async def serve(options: argparse.Namespace, stop: Stop) -> None:
    """Join a run and score until asked to stop; ``options`` are those of ``rewardhub.cli``.

    Raises:
        UserError: if there is no such pool, or a reward cannot be loaded here.
    """
    visible = gpus.select(options.gpus)  # before any process is started
    numbers = gpus.parse(options.gpus) if visible == "cuda" else []
    async with join("rewardhub", options, stop) as member:
        pools = options.pools
        kinds = options.rewards
        workers = options.workers
        await RewardhubService(
            member, pools=pools, kinds=kinds, num_workers=workers, gpu_numbers=numbers
        ).run()


class RewardhubService:
    """A reward hub of a run.

    Args:
        member: membership of the run.
        pools: pools to serve; empty: all pools of the run's domains.
        kinds: serve the pools with these kinds of rewards instead.
        num_workers: worker processes, None: the run's setting.
        gpu_numbers: GPUs for reward models; empty: what the environment allows.
        functions: the rewards of pool ``caller``, in the process that has them.
    """

    def __init__(
        self,
        member: Member,
        *,
        pools: Sequence[str] = (),
        kinds: Sequence[str] = (),
        num_workers: int | None = None,
        gpu_numbers: Sequence[int] = (),
        functions: FunctionPool | None = None,
    ) -> None:
        self.member = member
        self.bus = member.bus
        self.spec = member.spec
        self.settings = member.settings.rewardhub
        self.domains = self.member.settings.domains
        if pools and kinds:
            raise UserError("--pools and --rewards exclude each other; give one of them")
        self._chosen = list(pools), list(kinds)
        wanted_pools = pools or pools_of_kinds(self.domains, kinds) or own_pools(self.domains)
        self.pools = _select_pools(all_pools(self.domains), wanted_pools)
        self.workers = ScoreDispatcher(
            self._rewards(),
            num_workers=num_workers or self.settings.workers,
            timeout_s=self.settings.timeout_s,
            memory_mib=self.settings.worker_memory_mib,
            gpu_numbers=gpu_numbers,
            passed=self.settings.pass_env,
            functions=functions,
        )
        self.trials = PoolTrials()
        most = self.settings.broken_after
        self.health = WorkHealth(
            "pool", self.pools, lambda _: most, trial=self._trial, changed=member.poke
        )
        self.tally = RewardhubMetrics()
        self.ahead = AheadScorer(
            self.bus, self.workers, lambda: self.domains, self._takes_ahead, member.spans
        )
        self._jobs: dict[int, _Job] = {}  # by sequence in the stream
        self._tasks: set[asyncio.Task[None]] = set()
        self._room = asyncio.Event()
        self._state: Literal["starting", "serving", "draining"] = "starting"
        self._feeds: dict[str, asyncio.Task[None]] = {}  # by pool

    def _rewards(self) -> dict[str, RewardConfig]:
        """Return the rewards of the served pools by configuration key."""
        return {
            f"domains.{name}.rewards.{index}": reward
            for name, domain in self.domains.items()
            for index, reward in enumerate(domain.rewards)
            if reward.pool in self.pools
        }

    # -- life

    async def run(self) -> None:
        """Work until asked to stop, then drain."""
        self.member.announce(self.presence)
        self.member.report(self.metrics)
        stopping = asyncio.create_task(self.member.stop.asked.wait())
        reruns: LinkSubscription | None = None
        try:
            if self.pools:
                await self.workers.start()
            else:
                log.info("no domain of this run has a reward for a hub; waiting until one has")
            self._state = "serving"
            reruns = await answer_requests(
                self.bus, RERUNS, f"rewardhub.{self.member.id}", self.rerun
            )
            self.member.poke()
            self._open_feeds()
            while not stopping.done():
                await self.ahead.serve(self.pools)
                await asyncio.wait(
                    {stopping, *self._feeds.values()},
                    timeout=TICK_S,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                for feed in self._feeds.values():
                    if feed.done():
                        # A feed ends only with an error, which this raises.
                        feed.result()
                self._abandon_lapsed()
                self._follow_spec()
                self.health.start_trials()
        finally:
            if reruns is not None:
                await reruns.close()
            await self.ahead.close()
            for task in (stopping, *self._feeds.values()):
                task.cancel()
            await asyncio.gather(stopping, *self._feeds.values(), return_exceptions=True)
            await self._drain()

    def _takes_ahead(self, pool: str) -> bool:
        """Decide whether this hub scores episodes of incomplete groups of a pool at present."""
        return self.member.running.is_set() and self._state == "serving" and self.health.takes(pool)

    def _open_feeds(self) -> None:
        for pool in self.pools:
            if pool not in self._feeds:
                self._feeds[pool] = asyncio.create_task(self._feed(pool))

    async def _drain(self) -> None:
        self._state = "draining"
        self.member.poke()
        if self._tasks and self.member.desired != "stopped":
            await asyncio.wait(self._tasks, timeout=self.settings.drain_timeout_s)
        unfinished = list(self._tasks)
        for task in unfinished:
            task.cancel()
        await asyncio.gather(*unfinished, return_exceptions=True)
        await self.health.close()
        await self.workers.close()

    async def _feed(self, pool: str) -> None:
        """Fetch groups of one pool while there is room; when cancelled, hand back the rest."""
        queue = await self.bus.work_queue(EPISODES, pool)
        while True:
            await self.member.running.wait()
            if not self.health.takes(pool):
                await asyncio.sleep(TICK_S)
                continue
            most = max(1, self.settings.max_groups // max(len(self.pools), 1))
            free = most - sum(job.pool == pool for job in self._jobs.values())
            if free <= 0:
                self._room.clear()
                await self._room.wait()
                continue
            for delivery in await fetch_unless(queue, free, self.member.pausing.wait()):
                self._accept(pool, delivery)

    def _accept(self, pool: str, delivery: Delivery) -> None:
        if job := self._jobs.get(delivery.seq):
            # Delivered again: acknowledge the newest delivery.
            job.delivery = delivery
            return
        self._follow_spec()
        job = self._jobs[delivery.seq] = _Job(pool, delivery)
        task = job.task = asyncio.create_task(self._work(job))
        self._tasks.add(task)
        task.add_done_callback(lambda task: self._done(delivery.seq, task))

    def _done(self, seq: int, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        del self._jobs[seq]
        self._room.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            # Nothing was acknowledged, so another hub gets the group when this one exits.
            log.error("could not finish a group", exc_info=error)
            self.member.stop.request(described(error))

    def _abandon_lapsed(self) -> None:
        """Abandon the groups that other hubs may score by now."""
        lapsed = [
            job for job in self._jobs.values() if not job.is_scored and job.delivery.has_lapsed
        ]
        if lapsed:
            log.warning(
                "%d groups abandoned: other hubs may score them, since this one did not run",
                len(lapsed),
            )
        for job in lapsed:
            if job.task is not None:
                job.task.cancel()

    def _follow_spec(self) -> None:
        """Follow the configuration, whose rewards and pools may change when the learner resumes."""
        if self.member.spec is self.spec:
            return
        self.spec = self.member.spec
        self.domains = self.member.settings.domains
        present, (pools, kinds) = all_pools(self.domains), self._chosen
        named_pools = [pool for pool in pools if pool in present]
        serving_pools = own_pools(self.domains)
        if pools:
            serving_pools = named_pools
        elif kinds:
            serving_pools = pools_of_kinds(self.domains, kinds)
        for pool in set(self.pools) - set(serving_pools):
            log.info("pool %s is no longer part of the run", pool)
            self._feeds.pop(pool).cancel()
        for pool in set(serving_pools) - set(self.pools):
            log.info("pool %s is new", pool)
        # In place, as self.health shares the list.
        self.pools[:] = serving_pools
        self.workers.adopt(self._rewards())
        for pool in serving_pools:
            self.health.renew(pool)
        self._open_feeds()
        self.member.poke()

    # -- one group

    async def _work(self, job: _Job) -> None:
        try:
            group = await job.delivery.load()
            if not isinstance(group, wire.Group):
                await self._refuse(job)
            elif not self.health.takes(job.pool):
                # Fetched before the pool was found broken.
                await self._hand_back(job, self.health.delay_s(job.pool), "its pool fails here")
            elif refused := find_refusal(group, job.pool, self.domains, job.delivery.num_delivered):
                await self._close(job, group.ticket, group.domain, group.eval_step, refused)
            else:
                await self._score(job, group)
        except asyncio.CancelledError:
            await asyncio.shield(job.delivery.nak(self.health.delay_s(job.pool)))
            raise

    async def _refuse(self, job: _Job) -> None:
        delivery = job.delivery
        close = CloseAction("malformed", delivery.error)
        await self._close(job, delivery.ticket, "unknown", delivery.eval_step, close)

    async def _score(self, job: _Job, group: wire.Group) -> None:
        section = self.domains[group.domain]
        scoring = GroupScoring(group, section.rewards, self.settings.max_retries)
        started_at = time.monotonic()
        try:
            with self.member.spans.work(
                "reward", ticket=group.ticket if group.eval_step < 0 else 0
            ):
                ending = await score_group(scoring, section, self.workers)
        except NoWorkerError as error:
            ending = CloseAction("aborted", str(error), own=False)
        if isinstance(ending, CloseAction) and job.delivery.has_lapsed:
            # the hub did not run for long, so its timeouts say nothing about the reward
            job.delivery.abandon()
            return
        self.tally.retries += scoring.num_retries
        self.tally.cost += scoring.cost
        key = ticket_key(group.ticket, evaluation=group.eval_step >= 0)
        if isinstance(ending, ForwardAction):
            # Else others have scored it.
            if scoring.num_asked:
                self.health.succeeded(job.pool)
                self.trials.forget(job.pool)
        elif self._fails(job, key, scoring, ending):
            await self._hand_back(job, HAND_BACK_S, ending.detail)
            return
        self.health.settled(job.pool, key)
        if isinstance(ending, CloseAction):
            await self._close(job, group.ticket, group.domain, group.eval_step, ending)
        else:
            await self._forward(job, ending, time.monotonic() - started_at)

    def _fails(self, job: _Job, key: str, scoring: GroupScoring, ending: CloseAction) -> bool:
        """Count a failed group; return whether to hand it to another hub, as this host may fail."""
        delivery = job.delivery.num_delivered
        self.trials.keep(job.pool, scoring)
        self.health.failed(job.pool, key, delivery, ending.detail)
        return ending.reason == "aborted" or not (
            ending.own or self.health.blames(job.pool, key, delivery)
        )

    async def _hand_back(self, job: _Job, delay_s: float, reason: str) -> None:
        log.warning("ticket %d handed back: %s", job.delivery.ticket, reason)
        self.tally.handed_back += 1
        await job.delivery.nak(delay_s)

    async def _trial(self, pool: str, number: int) -> tuple[bool | None, str]:
        return await self.trials.trial(pool, self.domains, self.workers)

    async def rerun(self, message: wire.Message) -> wire.Message | None:
        """See ``rewardhub.scoring_job.rescore_group``."""
        return await rescore_group(message, self.domains, self.workers, self.member.id)

    async def _forward(self, job: _Job, forward: ForwardAction, seconds: float) -> None:
        job.is_scored = True
        group = msgspec.structs.replace(
            forward.group,
            reward_s=forward.group.reward_s + seconds,
            reward_hubs=[*forward.group.reward_hubs, self.member.id],
        )
        key = ticket_key(group.ticket, evaluation=group.eval_step >= 0)
        message_id = f"{key}-{forward.key}" if forward.key else key
        try:
            await self.bus.publish(
                forward.stream, group, key=forward.key, ticket=group.ticket, message_id=message_id
            )
        except WireError as error:
            reason: wire.ClosedReason = "too_large" if isinstance(error, TooLarge) else "malformed"
            await self._close(
                job, group.ticket, group.domain, group.eval_step, CloseAction(reason, str(error))
            )
            return
        self.tally.add(group, seconds)
        await job.delivery.ack()

    async def _close(
        self, job: _Job, ticket: int, domain: str, eval_step: int, close: CloseAction
    ) -> None:
        closed = wire.Closed(
            ticket=ticket,
            domain=domain,
            reason=close.reason,
            detail=close.detail,
            by=self.member.id,
            eval_step=eval_step,
        )
        self.tally.closed += await close_ticket(
            self.bus, job.delivery, EPISODES, closed, evaluation=eval_step >= 0
        )

    # -- reporting

    def presence(self) -> wire.Presence:
        """Return this hub's presence message."""
        base_s, each_s = self.workers.curve.fit()
        in_hand = [job.delivery for job in self._jobs.values()]
        return wire.Presence(
            role="rewardhub",
            id=self.member.id,
            host=socket.gethostname(),
            pid=os.getpid(),
            state=self._state if self._state in {"starting", "draining"} else self.health.state,
            slots=self.settings.max_groups,
            running=len(self._jobs),
            base_s=base_s,
            each_s=each_s,
            at_once=self.workers.at_once,
            serves=self.health.serves,
            problem=self.health.problem,
            job=batch_job(),
            tickets=sorted({job.ticket for job in in_hand if job.ticket and job.eval_step < 0}),
        )

    def metrics(self) -> dict[str, float]:
        """Return this hub's metrics since the last call."""
        return {
            **self.tally.report(),
            "rewardhub/running": len(self._jobs),
            "rewardhub/scored_ahead": self.ahead.num_scored,
            "rewardhub/busy_workers": self.workers.num_busy,
            "rewardhub/killed_workers": self.workers.num_killed,
            "process/cpu_s": time.process_time() + self.workers.cpu_s(),
        }


def _select_pools(known_pools: Sequence[str], wanted_pools: Sequence[str]) -> list[str]:
    for pool in wanted_pools:
        if pool not in known_pools:
            raise UserError(
                f"--pools: {pool!r} is not allowed; the pools of this run are "
                f"{', '.join(known_pools) or 'none'}"
            )
    return list(dict.fromkeys(wanted_pools))
