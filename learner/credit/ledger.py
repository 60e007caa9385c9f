"""The ledger: which tickets are granted, how each ends, and which groups form each step. Pure.

It takes the records of the samples log one at a time and returns actions, without clock or I/O. Two
learners that read the same log hold the same ledger, on any hardware and however often they were
restarted.

**Credit.** ``issued = min(version + 1 + K, steps) * G + replaced``, with K = ``max_staleness``, G =
``groups_per_step`` and one replacement for each ticket that ended without being trained. Hence
``issued = trained + filtered + dropped + dead + open`` at any moment, and ``open = 0`` once
``version = steps``: ``trained = steps * G`` and ``replaced = filtered + dropped + dead``. If only
the best of a step's groups are trained on (``keep_fraction``), the others move from trained to
filtered as the step completes, and nothing replaces them.

**Rules.** K, G, the number of steps and the domains are the rules. They are part of the state, and
only a record of the log changes them (``RulesUpdate``), so every record is judged by the rules in
force when it is appended, by whichever incarnation of the learner reads it. At a change:

- tickets of a domain that the new rules lack end as dropped (reason ``removed``) unless the current
  step already holds their group; each is replaced by a ticket of a domain that exists;
- if the new rules allow fewer live tickets, the newest without a group end as dropped (reason
  ``withdrawn``) and are not replaced; if they allow more, more are issued;
- if the domains or their weights change, their shares are counted from the change on. Counted over
  the whole history, a domain that is added or gains weight would receive every ticket until it had
  caught up.

With c tickets issued as first-time credit and not withdrawn, ``open = c - trained - unselected``
holds across changes, since a replacement and its ticket cancel out. So the equation above holds in
its general form at any moment, and ``open`` is again at most ``(K + 1) * G`` of the new rules once
the current step completes.

**Order.** A step is the first G groups taken. The record that fills it ends the step's part of the
log: ``apply`` refuses the next one until ``complete_step`` has been called, so that no record is
ever judged by how long training happened to take.

**Late.** A ticket issued at version v carries ``min_version = v``; its tokens are v or newer, so it
may be trained in any step up to v + K, the step it is *due* in. A group whose oldest token lags
further behind is late (``broker.contract.staleness``), dropped and replaced.

With ``on_late: drop`` groups are taken in log order and stragglers become late. With ``on_late:
wait`` none does, because places are reserved: a group is taken into step t only if the tickets due
earlier still find room. Write L(d) for the live tickets (open, or arrived and queued) due in step d
or before, and a for the places of step t already taken. The invariant is

    for every d >= t:   L(d) <= (d - t + 1) * G - a                                              (*)

and with d = t it states that at most G - a tickets, so never more than G, are at the bound,
``min_version <= version - K``: they all fit into the current step. It always holds, by cases:

- start: (K + 1) * G tickets are due in step K, none earlier; a = 0.
- a group due in step D is taken: for d >= D both sides fall by one. For t <= d < D the left side
  stays; `_horizon` lets the group in only if (*) still holds there with a + 1, else it waits in the
  queue, in log order.
- a ticket ends untrained: its replacement is due in t + K, and no ticket is due later. L(d) does
  not grow for d < t + K and does not change for d >= t + K.
- the step completes: a = G turns into one step less, so (*) holds for t + 1 unchanged. The new
  tickets are due in t + 1 + K, where credit bounds all live tickets by (K + 1) * G.

**Closed early.** With ``close_early`` a ticket carries ``pass_rate``, and a hub may close it as
``filtered`` once that is certain. A step filters at most R groups (``max_replacements_per_step``);
beyond that they are trained unfiltered. So that a closing never takes what would have been trained,
a ticket carries ``pass_rate`` only if R has room for it: with f groups filtered in the step and e
open tickets that carry it, ``f + e <= R``. A group of another ticket is filtered only if ``f + e <
R``, so the left side never exceeds R, and the step's completion sets f to 0. A change of the rules
does not reach tickets that are out.

**Lost.** When the broker has lost its store, ``rlearner start --rebase`` closes the open tickets as
``lost``, by ordinary records of the log. One of them may name a number that this ledger has not
issued yet: an earlier incarnation had, in a part of the log that is gone. Up to that number all
tickets count as issued and dead, so that no number ever stands for two tickets. They replace
nothing and nothing replaces them: both sides of the first equation grow equally.

**Tasks.** A ticket of a domain with a curriculum, or with files of different weights, gets the task
that ``learner.credit.task_pool`` chooses; any other domain gets its tasks in turn. The first record
of a live ticket updates the pass rate of its task, whatever becomes of the group.

The ledger never deadlocks: while the step is not full, credit leaves at least one live ticket; once
all live ones have arrived, the one due first has room, since nothing is due before it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec

from broker.contract import wire
from broker.contract.staleness import due_step, is_late
from broker.errors import UserError
from learner.algorithm.selection import num_kept
from learner.credit.task_pool import PoolState, choose_task, observe_task, update_pool
from learner.credit.ticket_rules import (
    DomainRule,
    TicketRules,
    due_horizon,
    next_domain,
    task_seed,
)

ZERO_STD: Final = 1e-6
# Closed: the broker no longer knows the ticket.
LOST: Final = "lost"
# Dropped: the rules no longer have its domain.
REMOVED: Final = "removed"
# Closed: the group was certain to be filtered.
FILTERED: Final = "filtered"
# Dropped: the rules no longer allow as many tickets.
WITHDRAWN: Final = "withdrawn"
Outcome = Literal["filtered", "dropped", "dead"]


@dataclass(frozen=True)
class GroupArrival:
    """A scored group in the log."""

    ticket: int
    oldest_version: int  # of all its sampled tokens
    rewards: tuple[float, ...]  # one per episode
    passes_filters: bool = True  # by the rules
    # episodes that solved the task, of those that count for its pass rate
    successes: int = 0
    episodes: int = 0


@dataclass(frozen=True)
class TicketEnd:
    """A closing in the log, or a record that does not decode (ticket 0 if unknown)."""

    ticket: int
    # `late` counts as dropped, `filtered` of a ticket that allows it as such, everything else as
    # dead
    reason: str


@dataclass(frozen=True)
class RulesUpdate:
    """New rules from this record on; ``epoch`` is that of the learner that appended it."""

    rules: TicketRules
    epoch: int


Record = GroupArrival | TicketEnd | RulesUpdate


@dataclass(frozen=True)
class IssueTicket:
    """Publish this ticket."""

    ticket: wire.Ticket


@dataclass(frozen=True)
class TakeGroup:
    """Add the group to the current step."""

    number: int


@dataclass(frozen=True)
class HoldGroup:
    """Keep the group until a later action takes or forgets it."""

    number: int


@dataclass(frozen=True)
class ForgetTicket:
    """Drop a held group: its ticket has ended untrained."""

    number: int
    outcome: Outcome
    reason: str = ""  # set if a change of the rules ended it


@dataclass(frozen=True)
class RefuseRecord:
    """Ignore the record; a held group of the same ticket stays."""

    number: int
    reason: Literal["duplicate", "unknown"]


@dataclass(frozen=True)
class SkipTickets:
    """Count these tickets, whose records the broker lost, as issued and dead."""

    first: int
    last: int


Action = IssueTicket | TakeGroup | HoldGroup | ForgetTicket | RefuseRecord | SkipTickets


class LedgerEntry(msgspec.Struct, frozen=True):
    """A group that has arrived and is not trained yet."""

    number: int
    seq: int  # of its record in the log, which must not be trimmed yet
    oldest_version: int


class LedgerState(msgspec.Struct):
    """The complete state of the ledger, JSON-able."""

    rules: TicketRules
    rules_epoch: int = 0  # of the learner that appended them to the log, 0: none has
    version: int = 0  # completed steps, and the current policy version
    position: int = 0  # sequence of the last record applied
    issued: int = 0  # number of the newest ticket
    credit: int = 0  # tickets that replaced nothing, without those withdrawn
    # domain -> tickets that replaced none of the same domain, since the shares last changed
    base: dict[str, int] = {}
    # domain -> number of its tickets, the task index of the next one where tasks come in turn
    tasks: dict[str, int] = {}
    pools: dict[str, PoolState] = {}  # domain -> the tasks from which its tickets' are chosen
    live: dict[int, wire.Ticket] = {}  # open, queued or taken into the current step
    queue: list[LedgerEntry] = []  # in log order
    taken: list[LedgerEntry] = []  # the current step, in the order in which they were taken
    trained: int = 0
    filtered: int = 0  # and replaced
    # groups of completed steps that were not trained on; they count as filtered
    unselected: int = 0
    dropped: int = 0
    dead: int = 0
    duplicate: int = 0
    unknown: int = 0
    filtered_in_step: int = 0
    reasons: dict[str, int] = {}  # closing reason -> count


def is_zero_variance(rewards: tuple[float, ...]) -> bool:
    """Return whether rewards carry no signal: one, or a deviation (ddof 1) of at most 1e-6."""
    if len(rewards) < 2:
        return True
    mean = math.fsum(rewards) / len(rewards)
    return math.fsum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1) <= ZERO_STD**2


class Ledger:
    """State machine of tickets and steps: records in, actions out.

    Call ``open_credit`` once at the start, also after ``load``, where it changes nothing.

    Args:
        rules: of a new ledger, or the state of an old one.
    """

    def __init__(self, rules: TicketRules | LedgerState) -> None:
        if isinstance(rules, LedgerState):
            self.state = rules
        else:
            self.state = LedgerState(rules, pools=_update_pools({}, rules, 0))
        taken_numbers = {entry.number for entry in self.state.taken}
        self._arrived = {entry.number for entry in self.arrived}
        self._unplaced = Counter(
            ticket.min_version
            for number, ticket in self.state.live.items()
            if number not in taken_numbers
        )
        self._closable = sum(bool(self.state.live[number].pass_rate) for number in self.waiting_for)

    def dump(self) -> dict[str, Any]:
        """Return the state as JSON-able values."""
        state: dict[str, Any] = msgspec.to_builtins(self.state, str_keys=True)
        return state | {"rules": self.rules.plain()}

    @classmethod
    def load(cls, dumped: dict[str, Any]) -> Ledger:
        """Return the ledger from what ``dump`` returned, with its rules.

        Raises:
            UserError: if it is damaged.
        """
        try:
            state = msgspec.convert(dumped, LedgerState, strict=False)
        except (msgspec.ValidationError, RecursionError) as error:
            raise UserError(f"the checkpoint's ledger is damaged: {error}") from None
        return cls(state)

    # ----------------------------------------------------------------------------------------------
    # queries

    @property
    def rules(self) -> TicketRules:
        """Rules in force after the last applied record."""
        return self.state.rules

    @property
    def full(self) -> bool:
        """Whether the current step has all its groups; ``complete_step`` comes next."""
        return len(self.state.taken) >= self.rules.groups_per_step

    @property
    def done(self) -> bool:
        """Whether every step is completed."""
        return self.state.version >= self.rules.steps

    @property
    def open(self) -> int:
        """Number of tickets that have not ended, including those of the current step."""
        return len(self.state.live)

    @property
    def waiting_for(self) -> set[int]:
        """Numbers of the tickets that no record has ended yet."""
        return self.state.live.keys() - self._arrived

    def awaits(self, number: int) -> bool:
        """Return whether the next record of this ticket counts: it is live, without a group."""
        return number in self.state.live and number not in self._arrived

    @property
    def first_needed(self) -> int:
        """Sequence of the oldest record that a learner resuming from this state reads again."""
        return min([entry.seq for entry in self.arrived], default=self.state.position + 1)

    @property
    def first_kept(self) -> int:
        """Sequence of the oldest record that the log must keep; the last one identifies the log."""
        return min(self.first_needed, self.state.position)

    def may_read(self, number: int) -> bool:
        """Return whether a learner resuming from here may use this ticket: live or not issued."""
        return number in self.state.live or number > self.state.issued

    @property
    def arrived(self) -> list[LedgerEntry]:
        """Groups of the current step, in that order, and then the queue."""
        return self.state.taken + self.state.queue

    def ticket(self, number: int) -> wire.Ticket:
        """Return a live ticket.

        Raises:
            KeyError: if it is not issued yet, or has ended.
        """
        return self.state.live[number]

    def counts(self) -> dict[str, int]:
        """Return the terms of the conservation equation, and the numbers of refused records."""
        s = self.state
        return {
            "issued": s.issued,
            "trained": s.trained,
            "filtered": s.filtered + s.unselected,
            "dropped": s.dropped,
            "dead": s.dead,
            "open": self.open,
            "duplicate": s.duplicate,
            "unknown": s.unknown,
        }

    # ----------------------------------------------------------------------------------------------
    # events

    def open_credit(self) -> list[Action]:
        """Issue the tickets that the current version grants and that are not issued yet."""
        actions: list[Action] = []
        s = self.state
        granted = s.trained + s.unselected + self.rules.outstanding(s.version)
        while s.credit < granted:
            s.credit += 1
            actions.append(self._issue_next())
        return actions

    def apply(self, record: Record, seq: int) -> list[Action]:
        """Apply one record of the log.

        Raises:
            ValueError: if the step is full, or the record is not after the last one.
        """
        if self.full:
            raise ValueError(f"step {self.state.version} is full; complete it before record {seq}")
        if seq <= self.state.position:
            raise ValueError(f"record {seq} comes after record {self.state.position}")
        self.state.position = seq
        if isinstance(record, RulesUpdate):
            return self._change(record)
        number = record.ticket
        if isinstance(record, TicketEnd) and record.reason == LOST and number > self.state.issued:
            return [self._skip(number)]
        if not 1 <= number <= self.state.issued:
            self.state.unknown += 1
            return [RefuseRecord(number, "unknown")]
        if number not in self.state.live or number in self._arrived:
            self.state.duplicate += 1
            return [RefuseRecord(number, "duplicate")]
        if isinstance(record, GroupArrival):
            self._observe(record)
        if isinstance(record, TicketEnd):
            self._count(record.reason)
            outcome = self._outcome(number, record.reason)
            self.state.filtered_in_step += outcome == "filtered"
            actions = self._end(number, outcome)
        elif self._is_late(record.oldest_version):
            actions = self._end(number, "dropped")
        elif self._is_filtered(record):
            self.state.filtered_in_step += 1
            actions = self._end(number, "filtered")
        else:
            self.state.queue.append(LedgerEntry(number, seq, record.oldest_version))
            self._arrived.add(number)
            self._closable -= bool(self.state.live[number].pass_rate)
            actions = [HoldGroup(number)]
        return actions + self._fill()

    def lose(self, numbers: Collection[int]) -> list[LedgerEntry]:
        """Return and forget arrived groups that the log lost: their tickets wait again."""
        lost_entries = [entry for entry in self.arrived if entry.number in numbers]
        self._arrived.difference_update(entry.number for entry in lost_entries)
        self._closable += sum(
            bool(self.state.live[entry.number].pass_rate) for entry in lost_entries
        )
        self._unplaced.update(
            self.state.live[entry.number].min_version
            for entry in self.state.taken
            if entry in lost_entries
        )
        self.state.taken = [entry for entry in self.state.taken if entry not in lost_entries]
        self.state.queue = [entry for entry in self.state.queue if entry not in lost_entries]
        return lost_entries

    def complete_step(self) -> list[Action]:
        """Complete the trained step and begin the next version.

        Raises:
            ValueError: if the step is not full.
        """
        s = self.state
        if not self.full:
            raise ValueError(
                f"step {s.version} has {len(s.taken)} of {self.rules.groups_per_step} groups"
            )
        for entry in s.taken:
            del s.live[entry.number]
            self._arrived.discard(entry.number)
        num_trained = num_kept(len(s.taken), self.rules.keep_fraction)
        s.trained += num_trained
        s.unselected += len(s.taken) - num_trained
        s.taken = []
        s.filtered_in_step = 0
        s.version += 1
        return self.open_credit() + self._fill()

    # ----------------------------------------------------------------------------------------------
    # internals

    def _change(self, update: RulesUpdate) -> list[Action]:
        s = self.state
        old_rules = self.rules
        s.rules_epoch = max(s.rules_epoch, update.epoch)
        if update.rules == old_rules:
            return []
        s.rules = update.rules
        s.pools = _update_pools(s.pools, update.rules, s.issued)
        if _domain_weights(update.rules) != _domain_weights(old_rules):
            s.base = {}
        actions: list[Action] = []
        taken_numbers = {entry.number for entry in s.taken}
        # Newest first.
        free = [number for number in sorted(s.live, reverse=True) if number not in taken_numbers]
        removed = [number for number in free if not self.rules.has(s.live[number].domain)]
        for number in removed:
            self._count(REMOVED)
            self._leave(number, "dropped")
            actions.append(ForgetTicket(number, "dropped", REMOVED))
        surplus = s.credit - (s.trained + s.unselected + self.rules.outstanding(s.version))
        # So many of the removed tickets are not replaced.
        num_unneeded = min(max(surplus, 0), len(removed))
        s.credit -= num_unneeded
        actions += [self._issue_next() for _ in range(len(removed) - num_unneeded)]
        remaining = [number for number in free if number in s.live]
        # A stable sort: those without a group come first.
        remaining.sort(key=lambda number: number in self._arrived)
        for number in remaining[: max(surplus - num_unneeded, 0)]:
            self._count(WITHDRAWN)
            self._leave(number, "dropped")
            s.credit -= 1
            actions.append(ForgetTicket(number, "dropped", WITHDRAWN))
        return actions + self.open_credit() + self._fill()

    def _count(self, reason: str) -> None:
        self.state.reasons[reason] = self.state.reasons.get(reason, 0) + 1

    def _issue_next(self) -> IssueTicket:
        """Issue a ticket of the domain that is furthest behind its share."""
        domain = next_domain(self.rules.domains, self.state.base)
        self.state.base[domain] = self.state.base.get(domain, 0) + 1
        return self._issue(domain)

    def _issue(self, domain: str) -> IssueTicket:
        rule = self.rules.domain(domain)
        s = self.state
        task_index = self._next_task(rule)
        s.tasks[domain] = s.tasks.get(domain, 0) + 1
        s.issued += 1
        ticket = wire.Ticket(
            number=s.issued,
            domain=domain,
            task_index=task_index,
            seed=task_seed(self.rules.seed, "train", domain, task_index),
            min_version=s.version,
            max_staleness=self.rules.max_staleness,
            group_size=rule.group_size + rule.num_greedy + rule.num_redundant,
            min_group_size=rule.min_group_size + rule.num_greedy,
            deadline_s=rule.deadline_s,
            num_greedy=rule.num_greedy,
            num_redundant=rule.num_redundant,
            pass_rate=list(self.rules.pass_rate or ()) if self._may_close() else [],
        )
        self._closable += bool(ticket.pass_rate)
        s.live[ticket.number] = ticket
        self._unplaced[ticket.min_version] += 1
        return IssueTicket(ticket)

    def _next_task(self, rule: DomainRule) -> int:
        if rule.tasks is None:
            return self.state.tasks.get(rule.name, 0)
        pool = self.state.pools[rule.name]
        key = f"{self.rules.seed}/{rule.name}"
        return choose_task(pool, rule.tasks, key=key, step=self.state.version)

    def _observe(self, record: GroupArrival) -> None:
        """Update the pass rate of a live ticket's task, unless that is of earlier tasks."""
        ticket = self.state.live[record.ticket]
        pool = self.state.pools.get(ticket.domain)
        if pool is None or ticket.number <= pool.since:
            return
        tasks = self.rules.domain(ticket.domain).tasks
        if tasks is not None and tasks.curriculum is not None:
            observe_task(
                pool,
                tasks.curriculum,
                ticket.task_index,
                successes=record.successes,
                episodes=record.episodes,
            )

    def _skip(self, last: int) -> SkipTickets:
        s = self.state
        first = self.state.issued + 1
        s.issued = last
        s.dead = s.dead + last - first + 1
        s.reasons[LOST] = s.reasons.get(LOST, 0) + last - first + 1
        return SkipTickets(first, last)

    def _end(self, number: int, outcome: Outcome) -> list[Action]:
        """End a ticket that is not in the current step untrained, and issue its replacement."""
        domain = self._leave(number, outcome).domain
        return [
            ForgetTicket(number, outcome),
            self._issue(domain) if self.rules.has(domain) else self._issue_next(),
        ]

    def _leave(self, number: int, outcome: Outcome) -> wire.Ticket:
        """Remove a ticket that is not in the current step from the live ones."""
        s = self.state
        ticket = self.state.live.pop(number)
        self._unplaced[ticket.min_version] -= 1
        if number in self._arrived:
            self._arrived.discard(number)
            s.queue = [entry for entry in s.queue if entry.number != number]
        else:
            self._closable -= bool(ticket.pass_rate)
        setattr(s, outcome, getattr(s, outcome) + 1)
        return ticket

    def _is_late(self, oldest_version: int) -> bool:
        return is_late(oldest_version, self.state.version, self.rules.max_staleness)

    def _is_filtered(self, record: GroupArrival) -> bool:
        """Return whether dynamic sampling replaces the group, which it does up to a bound."""
        # For other tickets.
        reserved = self._closable - bool(self.state.live[record.ticket].pass_rate)
        if self.state.filtered_in_step + reserved >= self.rules.max_replacements_per_step:
            return False
        return not record.passes_filters or (
            self.rules.filter_zero_variance and is_zero_variance(record.rewards)
        )

    def _may_close(self) -> bool:
        """Return whether the step's bound leaves room for one more ticket that may close early."""
        room = self.rules.max_replacements_per_step - self.state.filtered_in_step - self._closable
        return self.rules.close_early and room > 0

    def _outcome(self, number: int, reason: str) -> Outcome:
        """Return the outcome of a closed ticket."""
        if reason == FILTERED and self.state.live[number].pass_rate:
            return "filtered"
        return "dropped" if reason == "late" else "dead"

    def _fill(self) -> list[Action]:
        """Take all groups from the queue that have room, in log order."""
        actions: list[Action] = []
        while not self.full and not self.done:
            horizon = self._horizon()
            queue = self.state.queue
            ready = (
                queued
                for queued in queue
                if self._is_late(queued.oldest_version)
                or due_step(self.state.live[queued.number].min_version, self.rules.max_staleness)
                <= horizon
            )
            if (entry := next(ready, None)) is None:
                break
            # Its tokens were older than its ticket allowed.
            if self._is_late(entry.oldest_version):
                actions += self._end(entry.number, "dropped")
            else:
                self.state.queue.remove(entry)
                self.state.taken.append(entry)
                self._unplaced[self.state.live[entry.number].min_version] -= 1
                actions.append(TakeGroup(entry.number))
        return actions

    def _horizon(self) -> float:
        """Return the latest due step that keeps (*) of the module docstring."""
        if self.rules.on_late == "drop":
            return math.inf
        rules = self.rules
        self._unplaced = +self._unplaced  # without versions of which no ticket is left
        return due_horizon(
            ((due_step(v, rules.max_staleness), self._unplaced[v]) for v in sorted(self._unplaced)),
            places=rules.groups_per_step - len(self.state.taken) - 1,
            version=self.state.version,
            groups_per_step=rules.groups_per_step,
        )


def _update_pools(
    pools: dict[str, PoolState], rules: TicketRules, issued: int
) -> dict[str, PoolState]:
    """Return the pools of the domains whose tasks the rules let the ledger choose."""
    return {
        rule.name: update_pool(pools.get(rule.name), rule.tasks, issued)
        for rule in rules.domains
        if rule.tasks is not None
    }


def _domain_weights(rules: TicketRules) -> list[tuple[str, float]]:
    return [(rule.name, rule.weight) for rule in rules.domains]
