"""Turns records into steps, for a live learner and for a replay. No broker, no files, no clock.

The caller decides where records come from and what else happens between them; the ledger decides
everything else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from broker.contract import wire
from broker.jetstream.bus import LogRecord
from learner.credit import record_intake
from learner.credit.ledger import (
    Action,
    ForgetTicket,
    HoldGroup,
    Ledger,
    LedgerEntry,
    RefuseRecord,
    TakeGroup,
)
from learner.credit.record_intake import RecordIntake
from learner.training import TrainingResult, TrainingThread


@dataclass(frozen=True)
class CompletedStep:
    """A completed step."""

    result: TrainingResult
    entries: Sequence[LedgerEntry]  # of its groups, in order
    actions: list[Action]  # the ledger's answer, for the caller to perform


def accepted_upload(
    entry: LogRecord, intake: RecordIntake, actions: Sequence[Action]
) -> wire.Parted | None:
    """Return the upload of an accepted group in parts: the ticket needs no other upload any more.

    Args:
        intake: the record, validated.
        actions: the ledger's answer to it.
    """
    is_refused = any(isinstance(action, RefuseRecord) for action in actions)
    return None if is_refused or intake.group is None else entry.parted


class RecordConsumer:
    """Feed of records to the ledger, and of the groups that it takes to the model.

    Args:
        ledger: the resumed one.
        training: between the same two steps as the ledger.
    """

    def __init__(self, ledger: Ledger, training: TrainingThread) -> None:
        self.ledger = ledger
        self.training = training
        self._groups: dict[int, wire.Group] = {}

    def resume(self, groups: Mapping[int, wire.Group]) -> None:
        """Restore the groups that arrived untrained; call this once, before any record.

        Args:
            groups: by ticket, one for each of ``ledger.arrived``.
        """
        self._groups = dict(groups)
        for entry in self.ledger.state.taken:
            self.training.add(self._groups.pop(entry.number), self.ledger.rules)

    def apply(self, entry: LogRecord) -> tuple[RecordIntake, list[Action]]:
        """Apply and return the next record, with the ledger's actions; never while that is full."""
        intake = record_intake.read_record(entry, self.ledger, self.training.backend.vocab_size)
        actions = self.ledger.apply(intake.record, entry.seq)
        if intake.group is not None and any(isinstance(action, HoldGroup) for action in actions):
            self._groups[intake.group.ticket] = intake.group
        return intake, actions

    def perform(self, actions: Sequence[Action], *, is_settled: bool = False) -> None:
        """Pass taken groups to the model; the caller issues tickets.

        Args:
            is_settled: the log holds no rules that were not read yet.
        """
        for action in actions:
            if isinstance(action, TakeGroup):
                self.training.add(
                    self._groups.pop(action.number), self.ledger.rules, is_settled=is_settled
                )
            elif isinstance(action, ForgetTicket):
                self._groups.pop(action.number, None)

    async def complete(self) -> CompletedStep | None:
        """Train the full step; return None if abandoned."""
        result = await self.training.finish(self.ledger.state.version, self.ledger.rules)
        if result is None:
            return None
        entries = list(self.ledger.state.taken)
        return CompletedStep(result, entries, self.ledger.complete_step())
