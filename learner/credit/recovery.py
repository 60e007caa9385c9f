"""Compares a starting learner's ledger with the broker, and rebases it after a loss (``--rebase``).

Ticket numbers are sequences of the tickets stream, positions those of the samples log, and the
ledger relies on both. So a rebase moves the streams and keeps the ledger's numbers; and since the
log is the ledger's only input, it consists of records of the log, which a later incarnation, a
replay and the audit read like all others:

1. a log that ends before the ledger's position is filled up to it, so that the next record follows
  it;
2. the rest of the log is read ahead, without training, for the tickets that it will grant;
3. if more numbers were issued (by the ledger file, or by what the broker still has), the next
   record is ``Closed{lost}`` of the highest one: all up to it count as issued and dead, so that
   hubs never see a number twice;
4. ``Closed{lost}`` for each ticket up to there that is still open: the ledger replaces them like
  all dead ones;
5. the tickets stream is emptied and filled up to the highest number: its next sequence is the next
  ticket's number.

If the learner is killed during a rebase, the next one finds the loss again, or what it needs in the
log. Groups that had arrived and were not trained are read from the archive if the log has lost
them; else their tickets end by 4.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from broker.contract import wire
from broker.contract.streams import SAMPLES, TICKETS, Stream
from broker.errors import LostState
from broker.jetstream.api import find_message
from broker.jetstream.bus import Bus, LogRecord
from broker.settings.run_address import is_held, noted_address, private_addresses
from learner.credit import archive, ledger_segments, record_intake
from learner.credit.ledger import LOST, Ledger, LedgerEntry
from learner.credit.ledger_file import digest_record
from learner.credit.tickets import REBASE
from learner.run_folder import STORE, previous_broker

log = logging.getLogger(__name__)

# Replaces a domain: no hub reads it.
NO_DOMAIN: Final = "_lost"
# Messages published at once: without a bound, a long gap would fill memory.
FILL_AT_ONCE: Final = 512


@dataclass(frozen=True)
class RecoveryResult:
    """Groups and tickets that the learner resumes with."""

    # by ticket: those that had arrived, not yet trained
    groups: dict[int, wire.Group] = field(default_factory=dict)
    lost: Sequence[LedgerEntry] = ()  # those whose groups are gone
    # those that the broker never had; to publish before any new ones
    unissued: Sequence[wire.Ticket] = ()


@dataclass(frozen=True)
class KnownProgress:
    """How far an earlier incarnation got, according to its files."""

    issued: int  # tickets
    consumed: int  # records of the log
    digests: Mapping[int, str] = field(default_factory=dict)  # of its newest records, by sequence


class Recovery:
    """Recovery of one start of the learner.

    Args:
        ledger: the loaded one; its credit is not open yet.
        folder: of the run; its ledger file is not cut yet.
        vocab_size: exclusive bound of token ids.
    """

    def __init__(self, bus: Bus, ledger: Ledger, folder: Path, vocab_size: int) -> None:
        self._bus = bus
        self._ledger = ledger
        self._folder = folder
        self._vocab_size = vocab_size
        self._known = known_progress(folder, ledger)
        self._groups: dict[int, wire.Group] = {}
        self._missing: list[LedgerEntry] = []
        self._unissued: list[wire.Ticket] = []
        self._loss = ""

    async def inspect_broker(self, *, rebase: bool) -> None:
        """Inspect the broker, before anything is changed.

        Raises:
            LostState: if the broker remembers less than the learner, and ``rebase`` is False. Or if
                the log was trimmed behind a checkpoint that is gone, which no rebase can repair.
        """
        position = self._ledger.state.position
        first, last = await self._bus.bounds(SAMPLES, known=max(position, self._known.consumed))
        tickets = await self._bus.last_seq(TICKETS)
        if last >= position and first > position + 1:
            gap = f"begin at record {first}, but record {position + 1} is still to be read"
            checkpoints = self._folder / "checkpoints"
            raise LostState(
                f"the broker's samples {gap}: the run has made checkpoints that are no longer in "
                f"{checkpoints}; put them back, or choose another run.name"
            )
        await self._find_groups(first, last if last >= position else 0)
        problems = []
        unissued = range(tickets + 1, self._ledger.state.issued + 1)
        if self._ledger.waiting_for.issuperset(unissued):
            # A checkpoint may be ahead of the stream: it holds the tickets that a step granted,
            # which are published after it. No hub has seen these numbers, and the ledger determines
            # the tickets.
            self._unissued = [self._ledger.ticket(number) for number in unissued]
        else:
            problems.append(
                f"tickets end at number {tickets}, but {self._ledger.state.issued} were issued"
            )
        if last < self._known.consumed:
            problems.append(
                f"samples end at record {last}, but {self._known.consumed} were consumed"
            )
        elif replaced := [
            seq for seq in sorted({position, self._known.consumed}) if await self._is_replaced(seq)
        ]:
            problems.append(
                f"samples hold another record {replaced[0]} than the one that was consumed"
            )
        if self._missing and not problems and (unclosed := await self._not_closed()):
            entry = unclosed[0]
            problems.append(
                f"samples no longer hold record {entry.seq}, the group of ticket {entry.number}"
            )
        self._loss = "; ".join(problems)
        if self._loss and not rebase:
            raise LostState(f"the broker's {self._loss}; {self._advice()}")

    def _advice(self) -> str:
        """Return how to continue after a loss: with the previous broker, if that is another."""
        store = self._folder / STORE
        is_private = noted_address(self._folder) in private_addresses(self._folder)
        if is_private and not is_held(self._folder) and (store / "jetstream").is_dir():
            return f"the run's streams are in {store}: `rlearner up {self._folder}` continues there"
        url = previous_broker(self._folder, self._bus.link.url)
        if not url:
            return REBASE
        command = f"`rlearner start {self._folder} --broker {url}` continues there"
        lost = "if that has lost its store, --rebase continues with the open tickets counted dead"
        return f"the run was last trained with the broker at {url}: {command}; {lost}"

    async def recover(self) -> RecoveryResult:
        """Resume, with a rebase after a loss; only the holder of the run may."""
        num_lost = self._num_lost(self._ledger)
        lost_entries = self._ledger.lose({entry.number for entry in self._missing})
        if self._loss:
            await self._rebase(num_lost)
            return RecoveryResult(self._groups, lost_entries)
        return RecoveryResult(self._groups, lost_entries, self._unissued)

    # ----------------------------------------------------------------------------------------------
    # groups

    async def _find_groups(self, first: int, last: int) -> None:
        """Read the groups that the ledger holds from the log, else from the archive."""
        entries = {entry.seq: entry for entry in self._ledger.arrived}
        if logged_seqs := [seq for seq in entries if first <= seq <= last]:
            numbers = {entry.number for entry in entries.values()}
            async with aclosing(
                self._bus.read_log(SAMPLES, min(logged_seqs), wanted=numbers.__contains__)
            ) as records:
                async for record in records:
                    self._keep_group(entries.get(record.seq), record)
                    if record.seq >= max(logged_seqs):
                        break
        missing = {
            entry.seq: entry for entry in self._ledger.arrived if entry.number not in self._groups
        }
        for frame in archive.select_frames(self._folder / archive.FOLDER, missing):
            self._keep_group(missing[frame.seq], frame.record())
        self._missing = [
            entry for entry in self._ledger.arrived if entry.number not in self._groups
        ]

    def _keep_group(self, entry: LedgerEntry | None, record: LogRecord) -> None:
        if (
            entry is None
            or not isinstance(record.message, wire.Group)
            or record.message.ticket != entry.number
        ):
            return
        # Another digest belongs to a record of an older store.
        if self._known.digests.get(record.seq) in (None, digest_record(record.data)):
            self._groups[entry.number] = record.message

    async def _is_replaced(self, seq: int) -> bool:
        """Return whether the log holds another record than the consumed one, of an older store."""
        known_digest = self._known.digests.get(seq)
        if known_digest is None:
            return False
        stored = await find_message(self._bus.link, SAMPLES.stream_name(self._bus.run), seq=seq)
        if stored is None or digest_record(stored.data) == known_digest:
            return False
        # The known digest may be that of a group whose parts were fetched.
        record = await self._bus.record(stored, SAMPLES)
        if isinstance(record.message, wire.Parted) or (
            record.parted is not None and record.message is None
        ):
            # Its parts are deleted, so it cannot be compared.
            return False
        return digest_record(record.data) != known_digest

    async def _not_closed(self) -> list[LedgerEntry]:
        """Return the missing groups that an earlier, interrupted rebase has not closed as lost."""
        closed = set()
        async for record in self._remaining_log(lambda _: False):
            if isinstance(record.message, wire.Closed) and record.message.reason == LOST:
                closed.add(record.message.ticket)
        return [entry for entry in self._missing if entry.number not in closed]

    # ----------------------------------------------------------------------------------------------
    # rebase

    @staticmethod
    def _num_lost(ledger: Ledger) -> int:
        return ledger.state.reasons.get(LOST, 0)

    async def _rebase(self, num_lost: int) -> None:
        """End every ticket that the broker's loss leaves without a record.

        Args:
            num_lost: tickets that earlier losses have ended.
        """
        await self._fill(SAMPLES, self._ledger.state.position)
        position = self._ledger.state.position
        if await self._is_replaced(position):
            # The record is of another log: no later start may compare with it.
            await self._bus.trim(SAMPLES, position + 1)
        future_ledger = await self._read_ahead()
        highest = max(
            self._known.issued, await self._bus.last_seq(TICKETS), future_ledger.state.issued
        )
        if highest > future_ledger.state.issued and not future_ledger.done:
            await self._close(
                highest,
                f"all up to here were issued, {future_ledger.state.issued} of them are known",
            )
            future_ledger = await self._read_ahead()
        open_numbers = [number for number in sorted(future_ledger.waiting_for) if number <= highest]
        for number in open_numbers:
            await self._close(number, "open when the broker lost its store")
        await self._fill(TICKETS, highest)
        await self._bus.trim(TICKETS, highest + 1)
        # As the audit counts: with tickets that the checkpoint does not know, and lost groups.
        num_dead = self._num_lost(await self._read_ahead()) - num_lost
        text = "the broker's %s; rebased: %d tickets counted dead, the next one is %d"
        log.warning(text, self._loss, num_dead, highest + 1)

    async def _fill(self, stream: Stream, last: int) -> None:
        """Advance a stream that ends before ``last`` to it, and empty it.

        A purge beyond the end would be faster, but nats-server (2.15.1) then compares expected
        sequences with a counter that the purge has not moved; so places are filled with messages
        that no process reads.
        """
        while (num_missing := last - await self._bus.last_seq(stream)) > 0:
            filler = self._closed(max(self._ledger.state.issued, 1), "fills a place")
            batch_size = min(num_missing, FILL_AT_ONCE)
            await asyncio.gather(
                *(self._bus.publish(stream, filler, key=NO_DOMAIN) for _ in range(batch_size))
            )
            await self._bus.trim(stream, min(last, await self._bus.last_seq(stream)) + 1)

    async def _read_ahead(self) -> Ledger:
        """Return the ledger as it will be once the log is consumed up to its current end."""
        future_ledger = Ledger.load(self._ledger.dump())
        future_ledger.open_credit()
        async for record in self._remaining_log(future_ledger.awaits):
            while future_ledger.full:
                future_ledger.complete_step()
            future_ledger.apply(
                record_intake.read_record(record, future_ledger, self._vocab_size).record,
                record.seq,
            )
        while future_ledger.full:
            future_ledger.complete_step()
        return future_ledger

    async def _remaining_log(
        self, is_awaited: Callable[[int], bool]
    ) -> AsyncGenerator[LogRecord, None]:
        """Yield the log from the ledger's position up to its current end; see ``Bus.read_log``."""
        position = self._ledger.state.position
        last = await self._bus.last_seq(SAMPLES)
        if last <= position:
            return
        async with aclosing(
            self._bus.read_log(SAMPLES, position + 1, wanted=is_awaited)
        ) as records:
            async for record in records:
                yield record
                if record.seq >= last:
                    return

    async def _close(self, number: int, detail: str) -> None:
        await self._bus.publish(
            SAMPLES, self._closed(number, detail), ticket=number, is_essential=True
        )

    def _closed(self, number: int, detail: str) -> wire.Closed:
        ticket = self._ledger.state.live.get(number)
        domain = ticket.domain if ticket else NO_DOMAIN
        return wire.Closed(
            ticket=number, domain=domain, reason="lost", detail=detail, by=self._bus.name
        )


def known_progress(folder: Path, ledger: Ledger) -> KnownProgress:
    """Return progress by the ledger and the newest ledger file, which may be ahead of it."""
    lines, _ = ledger_segments.read_newest(folder / ledger_segments.FOLDER)
    issued = max(
        (line.ticket if line.state == "issued" else line.counts.get("issued", 0) for line in lines),
        default=0,
    )
    consumed = max((line.seq for line in lines), default=0)
    digests = {line.seq: line.digest for line in lines if line.digest}
    return KnownProgress(
        max(issued, ledger.state.issued), max(consumed, ledger.state.position), digests
    )
