"""Validates records of the samples log and converts them for the ledger. Pure and deterministic."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from broker.contract import wire
from broker.jetstream.bus import LogRecord
from learner.algorithm.episodes import episode_rewards, final_trajectories
from learner.algorithm.filters import passes_filter, passes_pass_rate
from learner.credit.ledger import GroupArrival, Ledger, Record, RulesUpdate, TicketEnd
from learner.credit.ticket_rules import TicketRules


@dataclass(frozen=True)
class RecordIntake:
    """A validated record of the log."""

    record: Record  # for the ledger
    group: wire.Group | None = None  # if the record holds a usable one
    # why the record cannot be used, empty if it can; its bytes become a dead letter
    problem: str = ""


def read_record(entry: LogRecord, ledger: Ledger, vocab_size: int) -> RecordIntake:
    """Validate one record; an unusable one ends its ticket, if known, as ``malformed``.

    Args:
        entry: from the log reader.
        ledger: before the record is applied.
        vocab_size: exclusive bound of token ids.

    Raises:
        UserError: if the user's group filter failed.
    """
    message = entry.message
    if isinstance(message, wire.Closed):
        return RecordIntake(TicketEnd(message.ticket, message.reason))
    if isinstance(message, wire.RulesChange):
        return rules_change(message)
    # Its parts were not fetched, because its ticket awaits no record.
    if isinstance(message, wire.Parted):
        return RecordIntake(TicketEnd(message.ticket, "malformed"), problem=entry.error)
    if not isinstance(message, wire.Group):
        return RecordIntake(TicketEnd(entry.ticket, "malformed"), problem=entry.error)
    if problem := _find_problem(message, ledger, vocab_size):
        return RecordIntake(TicketEnd(message.ticket, "malformed"), problem=problem)
    oldest, _ = version_bounds([message]) or (ledger.state.version, 0)
    rules = ledger.rules
    passes_filters = passes_pass_rate(rules.pass_rate, message) and passes_filter(
        rules.group_filter, message
    )
    successes = [episode.success for episode in final_trajectories(message)]
    arrival = GroupArrival(
        message.ticket,
        oldest,
        episode_rewards(message),
        passes_filters=passes_filters,
        successes=sum(successes),
        episodes=len(successes),
    )
    return RecordIntake(arrival, group=message)


def rules_change(message: wire.RulesChange) -> RecordIntake:
    """Validate a record that sets the rules."""
    try:
        return RecordIntake(RulesUpdate(msgspec.convert(message.rules, TicketRules), message.epoch))
    except msgspec.ValidationError as error:
        return RecordIntake(TicketEnd(0, "malformed"), problem=f"RulesChange.rules: {error}")


def _find_problem(group: wire.Group, ledger: Ledger, vocab_size: int) -> str:
    """Return why a decoded group must not be trained on, empty if it may."""
    if group.pools:
        return f"the group was never scored by pool {group.pools[0]}"
    if group.eval_step >= 0 or group.policy != wire.ACTOR:
        return f"the group belongs to an evaluation (step {group.eval_step}, policy {group.policy})"
    ticket = ledger.state.live.get(group.ticket)
    if ticket is not None and (group.domain, group.task_index) != (
        ticket.domain,
        ticket.task_index,
    ):
        task = f"ticket {group.ticket} asked for {ticket.domain} task {ticket.task_index}"
        return f"{task}, not {group.domain} task {group.task_index}"
    num_episodes = len({trajectory.episode for trajectory in group.trajectories})
    if ticket is not None and num_episodes < ticket.min_group_size:
        count = f"{num_episodes} of the {ticket.group_size} episodes of ticket {group.ticket}"
        return f"{count}, which needs at least {ticket.min_group_size}"
    for trajectory in group.trajectories:
        largest = int(trajectory.token_ids.array().max(initial=0))
        if largest >= vocab_size:
            return (
                f"token id {largest} of episode {trajectory.episode}, the vocabulary has "
                f"{vocab_size}"
            )
    bounds = version_bounds([group])
    if bounds is not None and bounds[1] > ledger.state.version:
        return (
            f"a token of policy version {bounds[1]} while {ledger.state.version} is being trained"
        )
    return ""


def version_bounds(groups: list[wire.Group]) -> tuple[int, int] | None:
    """Return oldest and newest policy version of the sampled tokens, None if there are none."""
    runs = [
        trajectory.version_runs.array().reshape(-1, 2)
        for group in groups
        for trajectory in group.trajectories
    ]
    versions = [int(version) for run in runs for version, num_tokens in run if num_tokens > 0]
    return (min(versions), max(versions)) if versions else None
