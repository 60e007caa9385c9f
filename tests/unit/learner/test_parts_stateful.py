"""Groups in parts under duplication, lost halves, kills and trimming: every reader of a log reaches
one ledger.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from broker.contract import wire
from broker.contract.examples import EXAMPLES
from broker.jetstream.bus import LogRecord
from learner.consumer import RecordConsumer, accepted_upload
from learner.credit.ledger import Ledger
from learner.credit.ticket_rules import DomainRule, TicketRules

RULES = TicketRules(50, 3, 1, "drop", 0, (DomainRule("lake", 1.0, 1, 1, 600.0),))
EXAMPLE: Any = EXAMPLES[wire.Group]


def _group(ticket: wire.Ticket, version: int) -> wire.Group:
    (sampled, *_) = EXAMPLE.trajectories
    tokens = len(sampled.loss_mask.array())
    sampled = msgspec.structs.replace(
        sampled, episode=0, version_runs=wire.column([version, tokens], "<i4")
    )
    return msgspec.structs.replace(
        EXAMPLE, ticket=ticket.number, domain="lake", task_index=ticket.task_index, pools=[], scores=[],
        eval_step=-1, policy=wire.ACTOR, trajectories=[sampled],
    )  # fmt: skip


class _Reader:
    """One life of a learner: reads a log, and deletes parts of the store that it is given."""

    def __init__(
        self, ledger: Ledger, log: list[wire.Message], store: dict[int, dict[str, wire.Group]]
    ) -> None:
        training: Any = SimpleNamespace(
            backend=SimpleNamespace(vocab_size=1 << 30), add=lambda *_, **__: None
        )
        self.ledger, self._log, self._store = ledger, log, store
        self._consumer = RecordConsumer(ledger, training)
        self._consumer.resume(
            {entry.number: self._arrived(entry.number, entry.seq) for entry in ledger.arrived}
        )
        ledger.open_credit()

    def _arrived(self, ticket: int, seq: int) -> wire.Group:
        message = self._log[seq - 1]
        return self._store[ticket][message.upload] if isinstance(message, wire.Parted) else message  # type: ignore[return-value]

    def read(self, until: int) -> None:
        while self.ledger.state.position < min(until, len(self._log)):
            entry = self._record(self.ledger.state.position + 1)
            read, actions = self._consumer.apply(entry)
            if (parted := accepted_upload(entry, read, actions)) is not None:
                uploads = self._store[parted.ticket]
                self._store[parted.ticket] = {parted.upload: uploads[parted.upload]}
            self._consumer.perform(actions)
            while self.ledger.full:
                self._consumer.perform(self.ledger.complete_step())

    def _record(self, seq: int) -> LogRecord:
        message = self._log[seq - 1]
        if isinstance(message, wire.Parted) and self.ledger.awaits(message.ticket):
            found = self._store.get(message.ticket, {}).get(message.upload)
            return LogRecord(
                seq, found, "" if found else "a part is missing", message.ticket, b"", message
            )
        return LogRecord(seq, message, "", getattr(message, "ticket", 0), b"")


class PartsMachine(RuleBasedStateMachine):
    """Hubs store groups whole and in parts, again and again; learners read, die, and trim behind
    their checkpoints.
    """

    @initialize()
    def start(self) -> None:
        self.log: list[wire.Message] = []
        self.store: dict[int, dict[str, wire.Group]] = {}
        self.all_parts: dict[int, dict[str, wire.Group]] = {}  # as if none were ever deleted
        self.uploads = 0
        self.tickets: dict[int, wire.Ticket] = {}
        self.checkpoint = Ledger(RULES).dump()
        self.begin()

    def begin(self) -> None:
        self.life = _Reader(Ledger.load(self.checkpoint), self.log, self.store)

    def pick(self, back: int) -> wire.Ticket:
        self.tickets |= self.life.ledger.state.live
        return self.tickets[max(1, max(self.tickets) - back)]

    @rule(back=st.integers(0, 3), age=st.integers(0, 2))
    def store_in_parts(self, back: int, age: int) -> None:
        self.log.append(self.upload(self.pick(back), age))

    @precondition(lambda self: self.life.ledger.arrived)
    @rule(pick=st.integers(0, 2), age=st.integers(0, 2))
    def store_again(self, pick: int, age: int) -> None:
        """Store a second record of a ticket whose group waits in the learner: its first hub was
        slow, not dead.
        """
        arrived = self.life.ledger.arrived
        self.log.append(
            self.upload(self.life.ledger.ticket(arrived[pick % len(arrived)].number), age)
        )

    @rule(back=st.integers(0, 3))
    def store_whole(self, back: int) -> None:
        self.log.append(_group(self.pick(back), self.life.ledger.state.version))

    @rule(back=st.integers(0, 3))
    def die_before_the_record(self, back: int) -> None:
        self.upload(self.pick(back), 0)

    def upload(self, ticket: wire.Ticket, age: int) -> wire.Parted:
        made = _group(ticket, max(0, self.life.ledger.state.version - age))
        self.uploads += 1
        upload = f"{self.uploads:016x}"
        for store in (self.store, self.all_parts):
            store.setdefault(ticket.number, {})[upload] = made
        return wire.Parted(
            ticket.number, "lake", upload=upload, size=1, part_bytes=1, digest="0" * 32
        )

    @rule(back=st.integers(0, 3), reason=st.sampled_from(["late", "deadline"]))
    def close(self, back: int, reason: str) -> None:
        self.log.append(wire.Closed(self.pick(back).number, "lake", reason, "", "hub"))  # type: ignore[arg-type]

    @rule(count=st.integers(1, 4))
    def read(self, count: int) -> None:
        self.life.read(self.life.ledger.state.position + count)

    @rule()
    def kill(self) -> None:
        position = self.life.ledger.state.position
        self.begin()
        self.life.read(position)

    @rule()
    def take_checkpoint(self) -> None:
        """Trim the parts behind it, as ``CheckpointSaver`` does behind the oldest one."""
        self.checkpoint = self.life.ledger.dump()
        ledger = Ledger.load(self.checkpoint)
        for ticket in [number for number in self.store if not ledger.may_read(number)]:
            del self.store[ticket]

    @invariant()
    def every_reader_agrees(self) -> None:
        if not hasattr(self, "life"):
            return
        position, dumped = self.life.ledger.state.position, self.life.ledger.dump()
        for begun, store in ((self.checkpoint, self.store), (Ledger(RULES).dump(), self.all_parts)):
            copied = {ticket: dict(uploads) for ticket, uploads in store.items()}
            reader = _Reader(Ledger.load(begun), self.log, copied)
            reader.read(position)
            assert reader.ledger.dump() == dumped


def test_parts_under_any_interleaving() -> None:
    run_state_machine_as_test(
        PartsMachine, settings=settings(max_examples=100, stateful_step_count=30, deadline=None)
    )
