"""Plays the episodes of tickets, and reports how each ended."""

from __future__ import annotations

import logging

from broker.contract.streams import TICKETS
from broker.errors import described
from broker.system.fault import TracebackLog
from envhub.episodes.runners import EpisodeRunners
from envhub.episodes.teachers import TeacherScorer
from envhub.scheduling.slots import OF_THE_HOST
from envhub.task import EpisodeFailed
from envhub.tickets.assignment import task
from envhub.tickets.intake import TicketIntake
from envhub.tickets.outbox import InHand

log = logging.getLogger(__name__)


class TicketPlayer:
    """Plays episodes with the hub's runners, for the tickets of an intake.

    A domain's teacher scores those that are trained on.
    """

    def __init__(self, runners: EpisodeRunners, teachers: TeacherScorer) -> None:
        self._runners = runners
        self._teachers = teachers
        self._traces = TracebackLog()

    async def play(self, intake: TicketIntake, ticket: InHand, episode: int, name: str) -> None:
        """Play one episode; its result or failure goes to the slots unless its ticket has ended."""
        key = ticket.assignment.key
        step = ticket.assignment.step(intake.settings.train.groups_per_step)
        episode_task = task(ticket.assignment, ticket.domain, episode, name, step=step)

        def report_tokens(oldest_version: int) -> None:
            if intake.in_hand.get(key) is ticket:
                intake.perform(intake.slots.sampled(key, oldest_version))

        try:
            await intake.note_start(ticket)
            result = await self._runners.play(episode_task, report_tokens)
            if ticket.assignment.stream is TICKETS:
                await self._teachers.score(episode_task, result)
        except EpisodeFailed as error:
            self._fail(intake, ticket, episode, error)
            return
        except Exception as error:
            # a bug of the hub must cost this episode only
            log.exception("%s episode %d", key, episode)
            self._fail(intake, ticket, episode, EpisodeFailed("env", described(error)))
            return
        intake.health.succeeded(ticket.domain.name)
        if intake.in_hand.get(key) is ticket:
            intake.tally.add(result)
            ticket.results[episode] = result
            ticket.tasks.pop(episode, None)
            intake.perform(intake.slots.finished(key, episode))
            # the last one is scored with its group, unless that waits for others anyway
            if intake.in_hand.get(key) is ticket or ticket.early.pending:
                ticket.early.begin(result)
            intake.queue_turns.poke()

    def _fail(
        self, intake: TicketIntake, ticket: InHand, episode: int, error: EpisodeFailed
    ) -> None:
        # a hub that did not run for long finds many calls too late
        intake.abandon_lapsed()
        key = ticket.assignment.key
        if intake.in_hand.get(key) is not ticket:
            return
        intake.tally.failures += 1
        ticket.tasks.pop(episode, None)
        domain = ticket.domain.name
        delivery = ticket.delivery.num_delivered
        health = intake.health
        if error.kind in OF_THE_HOST:
            health.failed(domain, key, delivery, error.detail)
        is_own_fault = health.blames(domain, key, delivery)
        actions = intake.slots.failed(key, episode, error.kind, error.detail, own=is_own_fault)
        problem = f"domain {domain}, {key} episode {episode} failed: {error.detail}"
        if retry := intake.slots.describe_retry(key, episode, actions):
            problem += f"; {retry}"
        self._traces.say(log, problem, error.trace)
        intake.perform(actions)
        # groups without failures continue: if one ends well, the domain works after all
        if not health.takes(domain):
            keys = [
                key
                for key, ticket in intake.in_hand.items()
                if ticket.domain.name == domain and health.has_failed(domain, key)
            ]
            intake.hand_back(keys, health.delay_s(domain), "its domain fails here")
