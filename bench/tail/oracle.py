"""Schedules that know every length and hold all waiting answers in one place; work-conserving."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Final

from bench.tail.scene import (
    GROUP,
    GROUPS,
    LIMIT,
    PROMPT,
    SERVERS,
    SLOTS,
    Batch,
    Lengths,
    rules,
    throughput,
    train_s,
)
from learner.credit.ledger import Action, GroupArrival, IssueTicket, Ledger

# tokens, about what a slot decodes in a step: the best of those tried, from 250 to 8,000
SLACK: Final = 4000
Key = Callable[[int, int], float]  # (step, tokens) to rank: the least begins first


def orders() -> dict[str, Key]:
    """Return orders of waiting answers; none is best in every case."""
    return {
        # an earlier step first, then the longest
        "step": lambda step, tokens: step * LIMIT - tokens,
        # a long answer of the next step before a short one
        "slack": lambda step, tokens: step * SLACK - tokens,
    }


def best(lengths: Lengths, max_staleness: int) -> float:
    """Return the steps per second of the best order."""
    return max(run(lengths, max_staleness, key) for key in orders().values())


def run(lengths: Lengths, max_staleness: int, key: Key) -> float:
    """Return the steps per second of one order."""
    ledger = Ledger(rules(max_staleness))
    batches = [Batch() for _ in range(SERVERS)]
    waiting: list[tuple[float, int, int, int]] = []  # rank, id, ticket, tokens
    left: dict[int, int] = {}  # ticket: open answers
    ticket_of: dict[int, int] = {}
    log: list[int] = []
    position = 0
    number = 0
    now = 0.0
    trained_at = float("inf")
    ends: list[float] = []

    def perform(actions: list[Action]) -> None:
        nonlocal number
        for action in actions:
            if not isinstance(action, IssueTicket):
                continue
            ticket = action.ticket
            left[ticket.number] = GROUP
            for tokens in lengths.group(ticket.task_index, ticket.number):
                number += 1
                rank = key((ticket.number - 1) // GROUPS, tokens)
                heapq.heappush(waiting, (rank, number, ticket.number, tokens))

    perform(ledger.open_credit())
    while not ledger.done:
        while waiting and (free := [one for one in batches if one.running < SLOTS]):
            _, answer, ticket, tokens = heapq.heappop(waiting)
            ticket_of[answer] = ticket
            min(free, key=lambda one: one.running).add(answer, tokens, PROMPT)
        now = min(trained_at, *(one.next_end() for one in batches))
        for one in batches:
            one.advance(now)
            for answer in one.ended():
                one.remove(answer)
                ticket = ticket_of.pop(answer)
                left[ticket] -= 1
                if not left[ticket]:
                    log.append(ticket)
        if now >= trained_at:
            trained_at = float("inf")
            ends.append(now)
            perform(ledger.complete_step())
        while log[position:] and not ledger.full:
            perform(
                ledger.apply(
                    GroupArrival(log[position], ledger.state.version, (0.0, 1.0)), position + 1
                )
            )
            position += 1
        if ledger.full and trained_at == float("inf"):
            trained_at = now + train_s()
    return throughput(ends)
