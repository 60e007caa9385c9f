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

    trained: TrainingResult
    taken: Sequence[LedgerEntry]  # its groups, in order
    actions: list[Action]  # the ledger's answer, for the caller to perform


def accepted_upload(
    entry: LogRecord, read: RecordIntake, actions: Sequence[Action]
) -> wire.Parted | None:
    """Return the upload of a group in parts that its ledger has accepted: the ticket needs no other
    one any more.

    Args:
        read: the record, validated.
        actions: the ledger's answer to it.
    """
    is_refused = any(isinstance(action, RefuseRecord) for action in actions)
    return None if is_refused or read.group is None else entry.parted


class RecordConsumer:
    """Feed of records to the ledger, and of the groups that it takes to the model.

    Args:
        ledger: the resumed one.
        training: between the same two steps as the ledger.
    """

    def __init__(self, ledger: Ledger, training: TrainingThread) -> None:
        self.ledger = ledger
        self.training = training
        self._held: dict[int, wire.Group] = {}

    def resume(self, groups: Mapping[int, wire.Group]) -> None:
        """Restore the groups that had arrived and were not trained; call this once, before any
        record.

        Args:
            groups: by ticket, one for each of ``ledger.arrived``.
        """
        self._held = dict(groups)
        for entry in self.ledger.state.taken:
            self.training.add(self._held.pop(entry.number), self.ledger.rules)

    def apply(self, entry: LogRecord) -> tuple[RecordIntake, list[Action]]:
        """Apply the next record, never while the ledger is full; return it decoded, with the
        actions to perform.
        """
        read = record_intake.read_record(entry, self.ledger, self.training.backend.vocab_size)
        actions = self.ledger.apply(read.record, entry.seq)
        if read.group is not None and any(isinstance(action, HoldGroup) for action in actions):
            self._held[read.group.ticket] = read.group
        return read, actions

    def perform(self, actions: Sequence[Action], *, is_settled: bool = False) -> None:
        """Pass taken groups to the model; the caller issues tickets.

        Args:
            is_settled: the log holds no rules that were not read yet.
        """
        for action in actions:
            if isinstance(action, TakeGroup):
                self.training.add(
                    self._held.pop(action.number), self.ledger.rules, is_settled=is_settled
                )
            elif isinstance(action, ForgetTicket):
                self._held.pop(action.number, None)

    async def complete(self) -> CompletedStep | None:
        """Train the full step; return None if abandoned."""
        trained = await self.training.finish(self.ledger.state.version, self.ledger.rules)
        if trained is None:
            return None
        taken = list(self.ledger.state.taken)
        return CompletedStep(trained, taken, self.ledger.complete_step())
