"""The environment hub process: takes tickets, plays their episodes, and publishes groups or
closings.

Delivery is at-least-once. A ticket is acknowledged only after its Group or Closed is stored, so the
ticket of a hub that exits in between is delivered again, to any hub; the learner counts the first
record of a ticket.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import math
import os
import random
import socket
import time
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from typing import Final

from broker.channel import carriers
from broker.contract import wire
from broker.contract.streams import EVALTICKETS, TICKETS, Stream
from broker.errors import ConfigError, RlearnerError, UserError
from broker.runtime.process import Member, Stop, join
from broker.runtime.work_health import WorkHealth
from broker.settings.timeouts import seconds
from broker.system.batch_job import batch_job
from broker.system.process_identity import this_process
from broker.system.processor_use import ProcessorUse
from envhub.config import EnvhubSection
from envhub.domain import Domain, load_domains
from envhub.envs.base import WORKER
from envhub.episodes.rerun import TicketReruns
from envhub.episodes.runners import EpisodeLimits, EpisodeRunners
from envhub.episodes.seats.policies import SCRIPTS, PlayedPolicies
from envhub.episodes.teachers import TeacherScorer, load_teachers
from envhub.episodes.ticket_player import TicketPlayer
from envhub.episodes.trial import trial
from envhub.lengths.predictor import LengthPredictor
from envhub.lengths.shared import LengthStore
from envhub.scheduling import slots
from envhub.servers.generate import TurnGenerator
from envhub.servers.sample import sample_size
from envhub.servers.servers import ServerRoster
from envhub.tickets.feed import TicketFeed
from envhub.tickets.intake import TicketIntake
from envhub.workers import sandboxed
from envhub.workers.calls import EnvironmentCalls
from envhub.workers.worker_pool import WorkerPools
from rlearner_text.model_files import local_model
from rlearner_text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

TICK_S: Final = 0.25
# for the last publishes and hand-backs
FAREWELL_S: Final = 10.0
# without any rollout server, before a drain waits no longer: nothing could be sampled
UNSERVED_S: Final = 2.0
# for what the hub has learnt about lengths
LAST_EXCHANGE_S: Final = 2.0


class TooManyHung(RlearnerError):
    """Too many threads never returned from an environment, so this hub exits."""


async def serve(options: argparse.Namespace, stop: Stop) -> None:
    """Join a run and play its tickets until a stop is requested.

    Raises:
        UserError: if a domain is unknown, an environment cannot run here, or a data file differs
            from the run's.
    """
    async with join("envhub", options, stop) as member:
        model = await local_model(member.bus, member.spec)
        await EnvironmentHub(member, model.path, n=options.n, names=options.domains).run()


class EnvironmentHub:
    """One environment hub in one run.

    Args:
        model_path: the run's model on this host, for its tokenizer.
    """

    def __init__(
        self, member: Member, model_path: str, *, n: int | None = None, names: Iterable[str] = ()
    ) -> None:
        self.run_settings = member.settings
        self.settings = member.settings.envhub
        self.member = member
        self.spec = member.spec
        self._names = list(names)
        self.domains = _select_domains(load_domains(self.run_settings), self._names)
        for domain in self.domains.values():
            domain.check()
            sandboxed.require(domain)
        tokenizer = Tokenizer.of_run(model_path, self.run_settings.model)
        num_slots = n or self.settings.n
        if any(domain.isolation in WORKER for domain in self.domains.values()):
            cores = ProcessorUse().num_cores()
            num_slots = limit_slots(num_slots, self.settings, cores)
        self.client = carriers.make_client(member.settings.broker.channel, member.bus)
        context = max(domain.section.max_context_tokens for domain in self.domains.values())
        self.servers = ServerRoster(
            member.bus,
            # late, as the generator is made from this roster
            lambda: self.generator.in_use(),
            random.Random(),
            size=sample_size(num_slots, context),
        )
        clock = self.servers.clock
        retries = self.settings.max_retries
        self.generator = TurnGenerator(
            self.client, self.servers, name=member.id, max_retries=retries, clock=clock.now
        )
        limits = EpisodeLimits(
            seconds(self.settings.episode_timeout_s), seconds(self.settings.generate_timeout_s)
        )
        self.slots = slots.EpisodeSlots(num_slots, self.settings.max_retries)
        worker_envs = self.settings.worker_envs
        worker_pools = WorkerPools(
            self.settings.worker_memory_mib, self.settings.pass_env, worker_envs
        )
        calls = EnvironmentCalls(self.settings.step_timeout_s, clock.timeout)
        self.runners = EpisodeRunners(
            tokenizer,
            self.generator,
            calls,
            limits,
            worker_pools,
            max_workers=math.ceil(num_slots / worker_envs),
            worker_idle_s=self.settings.worker_idle_s,
        )
        self.runners.clock = clock
        self.runners.spans = member.spans
        self._tokenizer = tokenizer
        self.policies = self.runners.policies = self._load_policies()
        self.health = WorkHealth(
            "domain", self.domains, self._broken_after, trial=self._trial, changed=member.poke
        )
        self.teachers = TeacherScorer(
            tokenizer,
            self.generator,
            load_teachers(self.run_settings),
            timeout_s=limits.generate_timeout_s,
            max_context_tokens=self.run_settings.rollout.max_context_tokens,
            spans=member.spans,
        )
        self.lengths = LengthStore(member.bus, self._predictors)
        self.intake = TicketIntake(
            member,
            self.domains,
            episode_slots=self.slots,
            health=self.health,
            generator=self.generator,
            clock=clock,
            play=TicketPlayer(self.runners, self.teachers).play,
        )
        self._addresses: set[str] = set()
        self._feeds: dict[str, list[asyncio.Task[None]]] = {}  # by domain

    # -- life

    async def run(self) -> None:
        """Play tickets until a stop is requested, then drain."""
        self.client.announce = self.member.poke
        self.member.announce(self.presence)
        self.member.report(self.metrics)
        self.member.spawn(self.servers.serve())
        self.member.spawn(self._watch_servers())
        self.member.spawn(self.lengths.serve())
        self.member.spawn(TicketReruns(self.member, self.runners, self.domains).serve())
        for name in self.domains:
            self._open_feeds(name)
        stop_request = asyncio.create_task(self.member.stop.asked.wait())
        try:
            while not stop_request.done():
                feeds = [feed for of_domain in self._feeds.values() for feed in of_domain]
                await asyncio.wait(
                    {stop_request, *feeds}, timeout=TICK_S, return_when=asyncio.FIRST_COMPLETED
                )
                for feed in feeds:
                    if feed.done():
                        # a feed never ends by itself: this raises what it failed with
                        feed.result()
                self._tick()
                self.runners.stop_idle_workers(time.monotonic())
                self._count_hung()
        finally:
            feeds = [feed for of_domain in self._feeds.values() for feed in of_domain]
            for waiting in (stop_request, *feeds):
                waiting.cancel()
            await asyncio.gather(stop_request, *feeds, return_exceptions=True)
            # only now: a feed could still take tickets
            await self._drain()

    def _open_feeds(self, domain: str) -> None:
        feeds = [self._feed(stream, domain) for stream in (TICKETS, EVALTICKETS)]
        self._feeds[domain] = [asyncio.create_task(feed.run()) for feed in feeds]

    def _broken_after(self, domain: str) -> int:
        """Return after how many failed tickets in a row a domain counts as broken here.

        At least two, and at most as many as are played at once: where each attempt times out, more
        would take minutes.
        """
        at_once = self.slots.n // self.domains[domain].section.group_size
        return min(self.settings.broken_after, max(at_once, 2))

    def _feed(self, stream: Stream, domain: str) -> TicketFeed:
        section = self.domains[domain].section
        group_size = section.group_size
        if stream is EVALTICKETS:
            group_size = self.run_settings.eval.of_domain(section).group_size
        return TicketFeed(
            self.member,
            self.intake.queue_turns,
            stream,
            domain=domain,
            group_size=group_size,
            accept=self.intake.accept,
            in_hand=self.intake.count_episodes,
            ready=partial(self._ready, domain),
            changed=self.servers.changed,
        )

    async def _drain(self) -> None:
        self.slots.drain()
        self.member.poke()
        # once the broker refuses the key, nothing can be published any more
        ends_now = self.member.desired == "stopped" or self.member.bus.link.refused.done()
        served_at = time.monotonic()
        until = served_at + (0.0 if ends_now else self.settings.drain_timeout_s)
        while self.slots.jobs and (now := time.monotonic()) < min(until, served_at + UNSERVED_S):
            served_at = now if self.servers.all() else served_at
            await asyncio.sleep(TICK_S / 5)
            self._tick()
        self.intake.perform(self.slots.expire())
        await self.health.close()
        # before the connections close: what is not stored is played again elsewhere
        await self.intake.outbox.empty(FAREWELL_S)
        if not ends_now:
            # a slow broker must not delay the end
            with suppress(TimeoutError):
                async with asyncio.timeout(LAST_EXCHANGE_S):
                    await self.lengths.exchange()
        await self.client.close()
        await self.runners.close()
        if self.intake.outbox.failure is not None:
            raise self.intake.outbox.failure

    def _tick(self) -> None:
        intake = self.intake
        intake.abandon_lapsed()
        epoch = self.member.spec.epoch
        if self.member.spec is not self.spec:
            self._follow_spec()
        versions = [
            presence.policy_version
            for presence in (*self.servers.all(), *self.servers.learners())
            if presence.policy == wire.ACTOR and presence.epoch == epoch
        ]
        intake.perform(self.slots.advanced(max(versions, default=-1)))
        now = self.servers.clock.now()
        intake.perform(self.slots.tick(now, idle=intake.outbox.is_empty, left_s=intake.left_s))
        if self._serves_someone(TICKETS) and not self.slots.draining:
            self.health.start_trials()

    def _count_hung(self) -> None:
        """Exit in good order when too many threads hang: a thread cannot be stopped.

        Raises:
            TooManyHung: if ``envhub.max_hung_threads`` is reached.
        """
        hung = self.runners.calls.hung
        if hung >= self.settings.max_hung_threads:
            raise TooManyHung(
                f"{hung} threads hang in environments (envhub.max_hung_threads); "
                "set isolation: process"
            )

    def _follow_spec(self) -> None:
        """Adopt a new epoch: versions may be lower, and settings and domains other ones."""
        self.spec = self.member.spec
        self.run_settings = self.member.settings
        self.intake.settings = self.member.settings
        # a run that resumed may be at a lower version than before
        self.slots.version = -1
        domains = load_domains(self.run_settings)
        self.teachers.teachers = load_teachers(self.run_settings)
        self._renew_policies()
        if self._names:
            domains = {name: domain for name, domain in domains.items() if name in self._names}
        for name in self.domains.keys() - domains.keys():
            self._leave_domain(name)
        for name, domain in domains.items():
            if domain == self.domains.get(name):
                continue
            log.info("domain %s %s", name, "has new settings" if name in self.domains else "is new")
            domain.check()
            self._retire(name)
            self.runners.lengths.renew(name, domain.make_estimator)
            self.domains[name] = domain
            self.health.renew(name)
            if name not in self._feeds:
                self._open_feeds(name)
        self.member.poke()

    def _load_policies(self) -> PlayedPolicies:
        timeout_s = seconds(self.settings.generate_timeout_s)
        return PlayedPolicies(self.run_settings, self._tokenizer, timeout_s=timeout_s)

    def _renew_policies(self) -> None:
        """Adopt new policies; episodes under way keep those that they began with."""
        former = self.policies
        self.policies = self.runners.policies = self._load_policies()
        self.member.spawn(former.close())
        for name in [name for name in self.runners.idle if name.startswith(SCRIPTS)]:
            self._retire(name)

    def _leave_domain(self, name: str) -> None:
        """Drop a domain that the run no longer has; the learner's ledger has ended its tickets."""
        log.info("domain %s is no longer part of the run", name)
        del self.domains[name]
        for feed in self._feeds.pop(name):
            feed.cancel()
        in_hand = self.intake.in_hand
        keys = [key for key, ticket in in_hand.items() if ticket.assignment.domain == name]
        self.intake.hand_back(keys, 0.0, f"the run no longer has domain {name}")
        self._retire(name)

    def _retire(self, name: str) -> None:
        for environment in self.runners.idle.pop(name, []):
            self.runners.calls.retire(environment)

    async def _watch_servers(self) -> None:
        """Close connections to servers that are no longer followed; requests there then fail."""
        while True:
            await self.servers.changed(1.0)
            addresses = {presence.address for presence in self.servers.all()}
            for address in self._addresses - addresses:
                await self.client.forget(address)
            self._addresses = addresses

    def _serves_someone(self, stream: Stream) -> bool:
        """Return whether a server can play a queue's tickets; else only their deadlines run."""
        policies = self._served_policies()
        if stream is TICKETS:
            return wire.ACTOR in policies
        return bool(policies)

    def _ready(self, domain: str, stream: Stream) -> bool:
        """Return whether a queue's tickets can be played here at present."""
        if not (self.health.takes(domain) and self._serves_someone(stream)):
            return False
        served = self._served_policies()
        # without those who play and its teacher no ticket is taken, so that its time does not run
        if not self.policies.served_by(self.domains[domain].section) <= served:
            return False
        teacher = self.teachers.policy_for(domain)
        return stream is not TICKETS or teacher is None or teacher in served

    def _served_policies(self) -> set[str]:
        return {server.policy for server in self.servers.all() if server.state == "serving"}

    def _predictors(self) -> dict[str, tuple[str, LengthPredictor]]:
        """Return the predictor of each domain's lengths, with the name of its estimator."""
        lengths = self.runners.lengths
        return {
            name: (
                domain.section.length_estimator,
                lengths.of(name, domain.make_estimator, wire.ACTOR),
            )
            for name, domain in self.domains.items()
        }

    async def _trial(self, domain: str, number: int) -> tuple[bool | None, str]:
        return await trial(
            self.runners, self.domains[domain], f"{self.member.id}.trial{number}.{domain}", number
        )

    # -- what others see

    def presence(self) -> wire.Presence:
        """Return what this hub publishes about itself."""
        base_s, each_s = self.runners.calls.curve.fit()
        in_hand = self.intake.in_hand
        begun_tickets = [in_hand[key] for key in self.slots.begun if key in in_hand]
        return wire.Presence(
            role="envhub",
            id=self.member.id,
            host=socket.gethostname(),
            pid=os.getpid(),
            state="draining" if self.slots.draining else self.health.state,
            slots=self.slots.n,
            running=self.slots.running,
            waiting=self.slots.waiting,
            base_s=base_s,
            each_s=each_s,
            serves=self.health.serves,
            problem=self.health.problem,
            process=this_process(),
            job=batch_job(),
            key=self.client.key,
            tickets=[
                ticket.assignment.number
                for ticket in begun_tickets
                if ticket.assignment.stream is TICKETS
            ],
        )

    def metrics(self) -> dict[str, float]:
        """Return this hub's metrics of the last second."""
        return {
            **self.intake.tally.report(),
            **self.runners.lengths.calibration.report(),
            "process/cpu_s": time.process_time() + self.runners.worker_pools.cpu_s(),
            "envhub/running": self.slots.running,
            "envhub/waiting": self.slots.waiting,
            "envhub/slots": self.slots.n,
            "envhub/generate_retries": self.generator.retries,
            "envhub/hung_threads": self.runners.calls.hung,
            "envhub/workers": self.runners.worker_pools.living,
            "envhub/died_workers": self.runners.worker_pools.num_died,
            "envhub/tokens": self.generator.tokens,
        }


def limit_slots(num_slots: int, settings: EnvhubSection, cores: float) -> int:
    """Return how many episodes whose environments are in worker processes are played at once.

    Args:
        num_slots: as requested.
        cores: processors of this host.
    """
    if settings.worker_cpus is None:
        return num_slots
    most = max(1, int(cores / settings.worker_cpus)) * settings.worker_envs
    if most < num_slots:
        text = "plays %d environments at once, not %d: %g processors, envhub.worker_cpus=%g"
        log.info(text, most, num_slots, cores, settings.worker_cpus)
    return min(num_slots, most)


def _select_domains(domains: dict[str, Domain], names: list[str]) -> dict[str, Domain]:
    """Return the named domains, all if no name is given."""
    for name in names:
        if name not in domains:
            raise ConfigError("--domains", name, f"the run has {', '.join(domains) or 'none'}")
    if not domains:
        raise UserError("the run has no domains, so there is nothing for an environment hub to do")
    return {name: domains[name] for name in names or domains}
