"""Takes tickets, holds those that may have killed hubs, and gives each its end."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from typing import Any, Final

from broker.contract.streams import TICKETS, Stream
from broker.jetstream.bus import Delivery
from broker.runtime.process import Member
from broker.runtime.work_health import WorkHealth
from envhub.domain import Domain
from envhub.scheduling import slots
from envhub.servers.awake_clock import AwakeClock
from envhub.servers.generate import TurnGenerator
from envhub.tally import HubMetrics
from envhub.tickets.assignment import TicketAssignment, assignment
from envhub.tickets.attempts import AttemptNotes
from envhub.tickets.early_scores import EarlyScores
from envhub.tickets.feed import QueueTurns
from envhub.tickets.outbox import InHand, TicketOutbox

log = logging.getLogger(__name__)

# of a ticket that another hub plays alone
REDELIVERY_DELAY_S: Final = 30.0


class TicketIntake:
    """The tickets that a hub has taken and not ended, and what the slots decide about them.

    Args:
        domains: by name, as the hub has them at any time.
        play: plays an episode of one of this intake's tickets under a name that is unique at the
            servers.

    Attributes:
        in_hand: by key.
        settings: of the run; the hub replaces them when they change.
    """

    def __init__(
        self,
        member: Member,
        domains: dict[str, Domain],
        *,
        episode_slots: slots.EpisodeSlots,
        health: WorkHealth,
        generator: TurnGenerator,
        clock: AwakeClock,
        play: Callable[[TicketIntake, InHand, int, str], Coroutine[Any, Any, None]],
    ) -> None:
        self.settings = member.settings
        self.in_hand: dict[str, InHand] = {}
        self.slots = episode_slots
        self.health = health
        self.tally = HubMetrics()
        self.queue_turns = QueueTurns(episode_slots)
        self.attempts = AttemptNotes(member.bus, member.id)
        self.outbox = TicketOutbox(member, self.tally, self.attempts)
        self._member = member
        self._domains = domains
        self._generator = generator
        self._clock = clock
        self._play = play
        self._score_wait_s = member.settings.envhub.score_wait_s

    def accept(self, stream: Stream, domain: str, delivery: Delivery) -> int:
        """Take one delivery of a queue and return its group size; 0: not a ticket of that queue."""
        message = delivery.message
        if message is None or getattr(message, "domain", None) != domain:
            problem = delivery.error or f"a ticket of another domain in the queue of {domain}"
            self.outbox.refuse(stream, domain, delivery, problem)
            return 0
        ticket_assignment = assignment(message)
        ticket = self.in_hand.get(ticket_assignment.key)
        if ticket is None:
            self._take(ticket_assignment, delivery)
        else:
            # a redelivery: acknowledge the newest
            ticket.delivery = delivery
        return ticket_assignment.group_size

    def _take(self, ticket_assignment: TicketAssignment, delivery: Delivery) -> None:
        """Begin a ticket, or hold it until it is judged if it was delivered before."""
        key = ticket_assignment.key
        domain = self._domains[ticket_assignment.domain]
        early = EarlyScores(
            self._member.bus,
            ticket_assignment,
            domain.section,
            wait_s=self._score_wait_s,
            judged=partial(self._judged, key),
        )
        ticket = InHand(ticket_assignment, delivery, domain, early)
        # fetched just before the domain counted as broken
        if not self.health.takes(domain.name):
            self.outbox.hand_back(ticket, self.health.delay_s(domain.name), "its domain fails here")
            return
        traces = self._member.spans.traces
        if ticket_assignment.stream is TICKETS and traces is not None:
            traces.add(
                "deliver",
                ticket_assignment.number,
                delivery.stored_at,
                time.time(),
                deliveries=delivery.num_delivered,
            )
        self.in_hand[key] = ticket
        job = ticket_assignment.job(
            delivery.num_delivered,
            drop_late=self.settings.train.on_late == "drop",
            straggler_factor=domain.section.straggler_factor,
        )
        if delivery.num_delivered == 1:
            self.perform(self.slots.offer(job, self._clock.now()))
            return
        self.perform(self.slots.hold(job))
        if self.in_hand.get(key) is ticket:
            self._member.spawn(self._judge(ticket))

    async def _judge(self, ticket: InHand) -> None:
        """Begin a redelivered ticket, unless it has killed hubs."""
        key = ticket.assignment.key
        judgement = await self.attempts.judge(ticket.assignment, ticket.delivery.num_delivered)
        if self.in_hand.get(key) is not ticket:
            return
        if judgement is None:
            self.hand_back([key], REDELIVERY_DELAY_S, "another hub plays it alone")
            return
        ticket.judgement = judgement
        if judgement.poisonous:
            detail = (
                f"{judgement.deaths} hubs died while playing this ticket, "
                "the last one while playing nothing else"
            )
            self.perform(self.slots.close_poisonous(key, detail))
            return
        if judgement.alone:
            log.warning("%s may have killed %d hubs; playing it alone", key, judgement.deaths)
        self.perform(self.slots.admit(key, self._clock.now(), alone=judgement.alone))

    async def note_start(self, ticket: InHand) -> None:
        """Note that this hub plays a redelivered ticket, before its first episode."""
        async with ticket.note_lock:
            if ticket.judgement is not None and ticket.note_revision is None:
                ticket.note_revision = await self.attempts.begin(
                    ticket.assignment, ticket.judgement
                )

    def _judged(self, key: str, episode: int, solved: bool) -> None:
        self.perform(self.slots.judged(key, episode, solved=solved))

    def hand_back(self, keys: Iterable[str], delay_s: float, detail: str) -> None:
        """Return tickets to their queue, for other hubs."""
        self.perform(self.slots.hand_back(keys, delay_s, detail))

    def abandon_lapsed(self) -> None:
        """Abandon the tickets that other hubs may play by now, before anything ends them."""
        lapsed_keys = [key for key, ticket in self.in_hand.items() if ticket.delivery.has_lapsed]
        if lapsed_keys:
            log.warning(
                "%d tickets abandoned: other hubs may play them, since this one did not run",
                len(lapsed_keys),
            )
            self.perform(self.slots.abandon(lapsed_keys))

    def count_episodes(self, stream: Stream) -> int:
        """Return how many episodes the tickets in hand of a queue have."""
        assignments = [ticket.assignment for ticket in self.in_hand.values()]
        return sum(
            assignment.group_size for assignment in assignments if assignment.stream is stream
        )

    def left_s(self, key: str, episode: int) -> float:
        """Return for how long an episode's present turn is still expected to grow, 0 unknown."""
        return self._generator.open.left_s(self.in_hand[key].task_ids[episode], self._clock.now())

    def perform(self, actions: list[slots.Action]) -> None:
        """Perform what the slots have decided."""
        for action in actions:
            ticket = self.in_hand[action.key]
            match action:
                case slots.StartEpisode(key, episode, attempt):
                    name = f"{self._member.id}.{key}.{episode}.{attempt}"
                    ticket.task_ids[episode] = name
                    ticket.tasks[episode] = asyncio.create_task(
                        self._play(self, ticket, episode, name)
                    )
                case slots.HurryEpisode(_, episode):
                    self._generator.hurry(ticket.task_ids[episode])
                case slots.AbortEpisode(_, episode):
                    name = ticket.task_ids[episode]
                    ticket.cut_lengths.append(self._generator.open.length(name, self._clock.now()))
                    ticket.tasks.pop(episode).cancel()
                case slots.FinishGroup(key, episodes):
                    results = [ticket.results[episode] for episode in episodes]
                    del self.in_hand[key]
                    self.health.settled(ticket.domain.name, key)
                    self.tally.add_lengths(
                        [result.num_tokens for result in results], ticket.cut_lengths
                    )
                    self.outbox.finish(ticket, results)
                case slots.CloseTicket(key, reason, detail):
                    del self.in_hand[key]
                    self.health.settled(ticket.domain.name, key)
                    self.outbox.close(ticket, reason, detail)
                case slots.HandBack(key, delay_s, detail):
                    del self.in_hand[key]
                    self.outbox.hand_back(ticket, delay_s, detail)
                case slots.AbandonTicket(key):
                    del self.in_hand[key]
                    self.outbox.abandon(ticket)
        if actions:
            self.queue_turns.poke()
