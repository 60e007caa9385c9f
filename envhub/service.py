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
from broker.errors import ConfigError, RlearnerError, UserError, described
from broker.jetstream.bus import Delivery
from broker.runtime.process import Member, Stop, join
from broker.runtime.work_health import WorkHealth
from broker.settings.config import BrokerSection
from broker.settings.runspec import section
from broker.settings.timeouts import seconds
from broker.system.batch_job import batch_job
from broker.system.process_identity import this_process
from broker.system.workers.fault import TracebackLog
from envhub.config import EnvhubSection
from envhub.domain import Domain, load_domains
from envhub.episodes.rerun import TicketReruns
from envhub.episodes.runners import EpisodeLimits, EpisodeRunners
from envhub.episodes.trial import trial
from envhub.lengths.predictor import LengthPredictor
from envhub.lengths.shared import LengthStore
from envhub.scheduling import slots
from envhub.servers.generate import TurnGenerator
from envhub.servers.sample import sample_size
from envhub.servers.servers import ServerRoster
from envhub.tally import HubMetrics
from envhub.task import EpisodeFailed
from envhub.tickets.assignment import assignment, task
from envhub.tickets.attempts import AttemptNotes
from envhub.tickets.early_scores import EarlyScores
from envhub.tickets.feed import QueueTurns, TicketFeed
from envhub.tickets.outbox import InHand, TicketOutbox
from envhub.workers import sandboxed
from envhub.workers.calls import EnvironmentCalls
from envhub.workers.worker_pool import WorkerPools
from rlearner_text.model_files import local_model
from rlearner_text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

TICK_S: Final = 0.25
PLAYED_ELSEWHERE_S: Final = 30.0  # before a ticket that another hub plays alone is delivered again
FAREWELL_S: Final = 10.0  # for the last publishes and hand-backs
# without any rollout server, before a drain waits no longer: nothing could be sampled
UNSERVED_S: Final = 2.0
LAST_EXCHANGE_S: Final = 2.0  # for what the hub has learnt about lengths


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
        config = member.spec.config
        self.settings = section(config, "envhub", EnvhubSection)
        self.member = member
        self.spec = member.spec
        self._names = list(names)
        self.domains = _serving(load_domains(config), self._names)
        for domain in self.domains.values():
            domain.check()
            sandboxed.require(domain)
        tokenizer = Tokenizer.of_run(model_path, config)
        self.client = carriers.make_client(
            section(config, "broker", BrokerSection).channel, member.bus
        )
        context = max(domain.section.max_context_tokens for domain in self.domains.values())
        self.servers = ServerRoster(
            member.bus,
            lambda: self.generator.in_use(),
            random.Random(),
            size=sample_size(n or self.settings.n, context),
        )
        clock = self.servers.clock
        retries = self.settings.max_retries
        self.generator = TurnGenerator(
            self.client, self.servers, name=member.id, max_retries=retries, clock=clock.now
        )
        limits = EpisodeLimits(
            seconds(self.settings.episode_timeout_s), seconds(self.settings.generate_timeout_s)
        )
        self.slots = slots.EpisodeSlots(n or self.settings.n, self.settings.max_retries)
        nurseries = WorkerPools(self.settings.worker_memory_mib, self.settings.pass_env)
        calls = EnvironmentCalls(self.settings.step_timeout_s, clock.timeout)
        self.players = EpisodeRunners(
            tokenizer, self.generator, calls, limits, nurseries, max_workers=self.slots.n
        )
        self.players.clock = clock
        self.players.spans = member.spans
        self.health = WorkHealth(
            "domain", self.domains, self._broken_after, trial=self._trial, changed=member.poke
        )
        self.lengths = LengthStore(member.bus, self._predictors)
        self.tally = HubMetrics()
        self.turnstile = QueueTurns(self.slots)
        self.attempts = AttemptNotes(member.bus, member.id)
        self.outbox = TicketOutbox(member, self.tally, self.attempts)
        self._traces = TracebackLog()
        self._in_hand: dict[str, InHand] = {}
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
        self.member.spawn(TicketReruns(self.member, self.players, self.domains).serve())
        for name in self.domains:
            self._open_feeds(name)
        stopping = asyncio.create_task(self.member.stop.asked.wait())
        try:
            while not stopping.done():
                feeds = [feed for of_domain in self._feeds.values() for feed in of_domain]
                await asyncio.wait(
                    {stopping, *feeds}, timeout=TICK_S, return_when=asyncio.FIRST_COMPLETED
                )
                for feed in feeds:
                    if feed.done():
                        # a feed never ends by itself: this raises what it failed with
                        feed.result()
                self._tick()
                self._count_hung()
        finally:
            tasks = [stopping, *(feed for of_domain in self._feeds.values() for feed in of_domain)]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._drain()

    def _open_feeds(self, domain: str) -> None:
        feeds = [self._feed(stream, domain) for stream in (TICKETS, EVALTICKETS)]
        self._feeds[domain] = [asyncio.create_task(feed.run()) for feed in feeds]

    def _broken_after(self, domain: str) -> int:
        """Return after how many failed tickets in a row a domain counts as broken here.

        Never after one, nor after more than are played at once: where each attempt times out, that
        takes minutes.
        """
        at_once = self.slots.n // self.domains[domain].section.group_size
        return min(self.settings.broken_after, max(at_once, 2))

    def _feed(self, stream: Stream, domain: str) -> TicketFeed:
        group_size = self.domains[domain].section.group_size
        if stream is EVALTICKETS:
            group_size = (self.spec.config.get("eval") or {}).get("group_size", 1)
        of_hub = (
            self.accept,
            self._episodes_in_hand,
            partial(self._ready, domain),
            self.servers.changed,
        )
        return TicketFeed(self.member, self.turnstile, stream, domain, group_size, *of_hub)

    def _episodes_in_hand(self, stream: Stream) -> int:
        return sum(
            held.asked.group_size for held in self._in_hand.values() if held.asked.stream is stream
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
        self._perform(self.slots.expire())
        await self.health.close()
        await self.outbox.empty(FAREWELL_S)
        if not ends_now:
            with suppress(TimeoutError):
                async with asyncio.timeout(LAST_EXCHANGE_S):
                    await self.lengths.exchange()
        await self.client.close()
        await self.players.close()
        if self.outbox.failure is not None:
            raise self.outbox.failure

    def _tick(self) -> None:
        self._abandon_lapsed()
        epoch = self.member.spec.epoch
        if self.member.spec is not self.spec:
            self._follow_spec()
        members = (*self.servers.all(), *self.servers.learners())
        versions = [
            member.policy_version
            for member in members
            if member.policy == wire.ACTOR and member.epoch == epoch
        ]
        self._perform(self.slots.advanced(max(versions, default=-1)))
        self._perform(
            self.slots.tick(
                self.servers.clock.now(), idle=self.outbox.is_empty, left_s=self._left_s
            )
        )
        if self._serves_someone(TICKETS) and not self.slots.draining:
            self.health.start_trials()

    def _abandon_lapsed(self) -> None:
        """Abandon the tickets that other hubs may play by now, before anything ends them."""
        lapsed = [key for key, held in self._in_hand.items() if held.delivery.has_lapsed]
        if lapsed:
            log.warning(
                "%d tickets abandoned: other hubs may play them, since this one did not run",
                len(lapsed),
            )
            self._perform(self.slots.abandon(lapsed))

    def _count_hung(self) -> None:
        """Exit in good order when too many threads hang: a thread cannot be stopped.

        Raises:
            TooManyHung: if ``envhub.max_hung_threads`` is reached.
        """
        hung = self.players.calls.hung
        if hung >= self.settings.max_hung_threads:
            raise TooManyHung(
                f"{hung} threads hang in environments (envhub.max_hung_threads); set isolation: process"
            )

    def _follow_spec(self) -> None:
        """Adopt a new epoch: versions may have gone back, and settings and domains may have
        changed.
        """
        self.spec = self.member.spec
        self.slots.version = -1
        domains = load_domains(self.spec.config)
        wanted_domains = {
            name: domain
            for name, domain in domains.items()
            if not self._names or name in self._names
        }
        for name in self.domains.keys() - wanted_domains.keys():
            self._leave_domain(name)
        for name, domain in wanted_domains.items():
            if domain == self.domains.get(name):
                continue
            log.info("domain %s %s", name, "has new settings" if name in self.domains else "is new")
            domain.check()
            self._retire(name)
            self.players.lengths.renew(name, domain.make_estimator)
            self.domains[name] = domain
            self.health.renew(name)
            if name not in self._feeds:
                self._open_feeds(name)
        self.member.poke()

    def _leave_domain(self, name: str) -> None:
        """Drop a domain that the run no longer has; the learner's ledger has ended its tickets."""
        log.info("domain %s is no longer part of the run", name)
        del self.domains[name]
        for feed in self._feeds.pop(name):
            feed.cancel()
        keys = [key for key, in_hand in self._in_hand.items() if in_hand.asked.domain == name]
        self._perform(self.slots.hand_back(keys, 0.0, f"the run no longer has domain {name}"))
        self._retire(name)

    def _retire(self, name: str) -> None:
        for environment in self.players.idle.pop(name, []):
            self.players.calls.retire(environment)

    async def _watch_servers(self) -> None:
        """Close connections to servers that left or are no longer followed; their pending requests
        fail at once.
        """
        while True:
            await self.servers.changed(1.0)
            addresses = {presence.address for presence in self.servers.all()}
            for address in self._addresses - addresses:
                await self.client.forget(address)
            self._addresses = addresses

    def _serves_someone(self, stream: Stream) -> bool:
        """Decide whether a queue's tickets can be played: a deadline should not run while no server
        is there.
        """
        policies = {server.policy for server in self.servers.all() if server.state == "serving"}
        return wire.ACTOR in policies if stream is TICKETS else bool(policies)

    def _ready(self, domain: str, stream: Stream) -> bool:
        """Decide whether a queue's tickets can be played here at present."""
        return self.health.takes(domain) and self._serves_someone(stream)

    def _predictors(self) -> dict[str, tuple[str, LengthPredictor]]:
        """Return the predictor of each domain's lengths, with the name of its estimator."""
        lengths = self.players.lengths
        return {
            name: (
                domain.section.length_estimator,
                lengths.of(name, domain.make_estimator, wire.ACTOR),
            )
            for name, domain in self.domains.items()
        }

    # -- tickets in

    def accept(self, stream: Stream, domain: str, delivery: Delivery) -> int:
        """Take one delivery of a queue. Return its group size, 0 if the message is not a ticket of
        that queue.
        """
        ticket = delivery.message
        if ticket is None or getattr(ticket, "domain", None) != domain:
            problem = delivery.error or f"a ticket of another domain in the queue of {domain}"
            self.outbox.refuse(stream, domain, delivery, problem)
            return 0
        assigned = assignment(ticket)
        held = self._in_hand.get(assigned.key)
        if held is not None:
            held.delivery = delivery  # a redelivery: acknowledge the newest
            return assigned.group_size
        of_domain = self.domains[domain]
        judged = partial(self._judged, assigned.key)
        early = EarlyScores(
            self.member.bus, assigned, of_domain.section, self.settings.score_wait_s, judged
        )
        held = InHand(assigned, delivery, of_domain, early)
        if not self.health.takes(domain):  # fetched just before the domain counted as broken
            self.outbox.hand_back(held, self.health.delay_s(domain), "its domain fails here")
            return assigned.group_size
        if stream is TICKETS and (traces := self.member.spans.traces) is not None:
            traces.add(
                "deliver",
                assigned.number,
                delivery.stored_at,
                time.time(),
                deliveries=delivery.num_delivered,
            )
        drop_late = (self.spec.config.get("train") or {}).get("on_late") == "drop"
        self._in_hand[assigned.key] = held
        job = assigned.job(
            delivery.num_delivered,
            drop_late=drop_late,
            straggler_factor=of_domain.section.straggler_factor,
        )
        if delivery.num_delivered == 1:
            self._perform(self.slots.offer(job, self.servers.clock.now()))
            return assigned.group_size
        self._perform(self.slots.hold(job))
        if self._in_hand.get(assigned.key) is held:
            self.member.spawn(self._judge(held))
        return assigned.group_size

    async def _judge(self, held: InHand) -> None:
        """Begin a redelivered ticket, unless it has killed hubs."""
        key = held.asked.key
        judgement = await self.attempts.judge(held.asked, held.delivery.num_delivered)
        if self._in_hand.get(key) is not held:
            return
        if judgement is None:
            self._perform(
                self.slots.hand_back([key], PLAYED_ELSEWHERE_S, "another hub plays it alone")
            )
            return
        held.judgement = judgement
        if judgement.poisonous:
            detail = f"{judgement.deaths} hubs died while playing this ticket, the last one while playing nothing else"
            self._perform(self.slots.condemn(key, detail))
            return
        if judgement.alone:
            log.warning("%s may have killed %d hubs; playing it alone", key, judgement.deaths)
        self._perform(self.slots.admit(key, self.servers.clock.now(), alone=judgement.alone))

    async def _begin(self, held: InHand) -> None:
        """Note that this hub plays a redelivered ticket, before its first episode."""
        async with held.beginning:
            if held.judgement is not None and not held.begun:
                await self.attempts.begin(held.asked, held.judgement)
                held.begun = True

    # -- actions

    def _perform(self, actions: list[slots.Action]) -> None:
        for action in actions:
            held = self._in_hand[action.key]
            match action:
                case slots.StartEpisode(key, episode, attempt):
                    held.names[episode] = f"{self.member.id}.{key}.{episode}.{attempt}"
                    held.tasks[episode] = asyncio.create_task(
                        self._play(key, held, episode, held.names[episode])
                    )
                case slots.HurryEpisode(_, episode):
                    self.generator.hurry(held.names[episode])
                case slots.AbortEpisode(_, episode):
                    held.cut.append(
                        self.generator.open.length(held.names[episode], self.servers.clock.now())
                    )
                    held.tasks.pop(episode).cancel()
                case slots.FinishGroup(key, episodes):
                    del self._in_hand[key]
                    self.health.settled(held.domain.name, key)
                    self.tally.add_lengths(
                        [held.played[episode].num_tokens for episode in episodes], held.cut
                    )
                    self.outbox.finish(held, [held.played[episode] for episode in episodes])
                case slots.CloseTicket(key, reason, detail):
                    del self._in_hand[key]
                    self.health.settled(held.domain.name, key)
                    self.outbox.close(held, reason, detail)
                case slots.HandBack(key, delay_s, detail):
                    del self._in_hand[key]
                    self.outbox.hand_back(held, delay_s, detail)
                case slots.AbandonTicket(key):
                    del self._in_hand[key]
                    self.outbox.abandon(held)
        if actions:
            self.turnstile.poke()

    def _left_s(self, key: str, episode: int) -> float:
        return self.generator.open.left_s(
            self._in_hand[key].names[episode], self.servers.clock.now()
        )

    async def _play(self, key: str, held: InHand, episode: int, name: str) -> None:
        groups_per_step = (self.spec.config.get("train") or {}).get("groups_per_step", 0)
        played_as = task(
            held.asked, held.domain, episode, name, step=held.asked.step(groups_per_step)
        )

        def sampled(oldest_version: int) -> None:
            if self._in_hand.get(key) is held:
                self._perform(self.slots.sampled(key, oldest_version))

        try:
            await self._begin(held)
            result = await self.players.play(played_as, sampled)
        except EpisodeFailed as error:
            self._failed(key, held, episode, error)
            return
        except Exception as error:
            # a bug of the hub may cost this episode only
            log.exception("%s episode %d", key, episode)
            self._failed(key, held, episode, EpisodeFailed("env", described(error)))
            return
        self.health.succeeded(held.domain.name)
        if self._in_hand.get(key) is held:
            self.tally.add(result)
            held.played[episode] = result
            held.tasks.pop(episode, None)
            self._perform(self.slots.finished(key, episode))
            # the last one is scored with its group, unless that waits for others anyway
            if self._in_hand.get(key) is held or held.early.pending:
                held.early.begin(result)
            self.turnstile.poke()

    def _judged(self, key: str, episode: int, solved: bool) -> None:
        self._perform(self.slots.judged(key, episode, solved=solved))

    def _failed(self, key: str, held: InHand, episode: int, error: EpisodeFailed) -> None:
        self._abandon_lapsed()  # a hub that did not run for long finds many calls too late
        if self._in_hand.get(key) is not held:
            return
        self.tally.failures += 1
        held.tasks.pop(episode, None)
        domain = held.domain.name
        delivery = held.delivery.num_delivered
        if error.kind in slots.OF_THE_HOST:
            self.health.failed(domain, key, delivery, error.detail)
        own = self.health.blames(domain, key, delivery)
        actions = self.slots.failed(key, episode, error.kind, error.detail, own=own)
        problem = f"domain {domain}, {key} episode {episode} failed: {error.detail}"
        self._traces.say(
            log,
            "; ".join(filter(None, (problem, self.slots.what_next(key, episode, actions)))),
            error.trace,
        )
        self._perform(actions)
        # groups without failures continue: if one ends well, the domain works after all
        if not self.health.takes(domain):
            mine = [
                key
                for key, ticket_in_hand in self._in_hand.items()
                if ticket_in_hand.domain.name == domain
            ]
            keys = [key for key in mine if self.health.doubts(domain, key)]
            self._perform(
                self.slots.hand_back(keys, self.health.delay_s(domain), "its domain fails here")
            )

    async def _trial(self, domain: str, number: int) -> tuple[bool | None, str]:
        return await trial(
            self.players, self.domains[domain], f"{self.member.id}.trial{number}.{domain}", number
        )

    # -- what others see

    def presence(self) -> wire.Presence:
        """Return what this hub publishes about itself."""
        base_s, each_s = self.players.calls.curve.fit()
        tickets_begun = [self._in_hand[key] for key in self.slots.begun if key in self._in_hand]
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
            tickets=[held.asked.number for held in tickets_begun if held.asked.stream is TICKETS],
        )

    def metrics(self) -> dict[str, float]:
        """Return this hub's metrics of the last second."""
        return {
            **self.tally.report(),
            **self.players.lengths.calibration.report(),
            "process/cpu_s": time.process_time() + self.players.nurseries.cpu_s(),
            "envhub/running": self.slots.running,
            "envhub/waiting": self.slots.waiting,
            "envhub/slots": self.slots.n,
            "envhub/generate_retries": self.generator.retries,
            "envhub/hung_threads": self.players.calls.hung,
            "envhub/workers": self.players.nurseries.living,
            "envhub/died_workers": self.players.nurseries.num_died,
            "envhub/tokens": self.generator.tokens,
        }


def _serving(domains: dict[str, Domain], names: list[str]) -> dict[str, Domain]:
    """Return the named domains, all if no name is given."""
    for name in names:
        if name not in domains:
            raise ConfigError("--domains", name, f"the run has {', '.join(domains) or 'none'}")
    if not domains:
        raise UserError("the run has no domains, so there is nothing for an environment hub to do")
    return {name: domains[name] for name in names} if names else domains
