"""Lines of the ledger file: one per event of a ticket, for the auditor and for people. Pure.

The lines follow from the log alone, without a clock: a restarted learner that reads the log again
writes the same bytes. A line of state ``boundary`` ends each step.
``learner/credit/ledger_segments.py`` keeps them in files, each of which begins with a ``summary``
of the lines before it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import partial
from hashlib import blake2b
from typing import Any, Final, Literal

import msgspec
from msgspec.structs import replace

from learner.credit.ledger import (
    LOST,
    Action,
    ForgetTicket,
    HoldGroup,
    IssueTicket,
    Ledger,
    LedgerEntry,
    RefuseRecord,
    SkipTickets,
)
from learner.credit.ticket_rules import TicketRules

End = Literal["trained", "filtered", "dropped", "dead"]
State = Literal[
    End,
    "issued",
    "arrived",
    "duplicate",
    "unknown",
    "boundary",
    "unrecorded",
    "lost",
    "rules",
    "summary",
]
FINAL: Final = ("trained", "filtered", "dropped", "dead")


class LedgerLine(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    forbid_unknown_fields=True,
    gc=False,
):
    """One event of the ledger.

    ``duplicate`` and ``unknown`` are ignored records; ``unrecorded`` stands for all missing lines
    before; ``lost`` takes ``arrived`` back: the broker lost the record before training; ``rules``
    is a record that set them. ``summary`` repeats the boundary that ends the previous file, with
    the rules, held groups and closing reasons.
    """

    state: State
    ticket: int = 0
    # Of the record that arrived or ended the ticket; of the last record applied, at a boundary.
    seq: int = 0
    step: int = 0  # the step of the group; completed steps, at a boundary
    oldest: int = -1  # oldest policy version among its sampled tokens
    newest: int = -1  # newest one
    digest: str = ""  # of the record's bytes
    reason: str = ""  # why it ended untrained
    domain: str = ""  # issued: from the ticket
    task_index: int = -1
    min_version: int = -1
    counts: dict[str, int] = {}  # boundary: the ledger's own
    groups_per_step: int = 0  # boundary: from the rules
    max_staleness: int = -1
    rules: dict[str, Any] = {}  # rules, summary: all of them
    # summary: the `arrived` lines of groups that have not ended, in that order
    held: tuple[LedgerLine, ...] = ()
    reasons: dict[str, int] | None = None  # summary: dead tickets by reason


_ENCODER: Final = msgspec.json.Encoder()
_DECODER: Final = msgspec.json.Decoder(LedgerLine)


def digest_record(data: bytes | bytearray) -> str:
    """Return the digest of a record's bytes, 16 hex digits."""
    return blake2b(data, digest_size=8).hexdigest()


class LedgerLineBuilder:
    """Converter of the ledger's actions to lines. Pure.

    Args:
        lines: those already in the newest file.
    """

    def __init__(self, lines: Iterable[LedgerLine] = ()) -> None:
        self.end = LedgerLine(state="boundary")  # the newest one, without rules
        self._arrived: dict[int, LedgerLine] = {}  # by ticket: arrived, and not ended yet
        self._reasons: dict[str, int] = {}
        for line in lines:
            self._note(line)

    def record(
        self,
        actions: Sequence[Action],
        *,
        seq: int,
        data_digest: str = "",
        reason: str = "",
        bounds: tuple[int, int] | None = None,
        rules: TicketRules | None = None,
    ) -> list[LedgerLine]:
        """Return the lines of one record of the log.

        Args:
            actions: the ledger's answer to it.
            seq: the record's sequence in the log.
            reason: why the ticket was closed, empty for a group.
            bounds: oldest and newest version of the group's tokens, None without tokens.
            rules: the rules that the record set, None for any other record.
        """
        oldest, newest = bounds or (-1, -1)
        new_line = partial(LedgerLine, seq=seq, digest=data_digest)
        lines: list[LedgerLine] = []
        if rules is not None:
            lines.append(new_line(state="rules", rules=rules.plain()))
        for action in actions:
            if isinstance(action, HoldGroup):
                lines.append(
                    self._note(
                        new_line(
                            state="arrived", ticket=action.number, oldest=oldest, newest=newest
                        )
                    )
                )
            elif isinstance(action, RefuseRecord):
                lines.append(self._note(new_line(state=action.reason, ticket=action.number)))
            elif isinstance(action, IssueTicket):
                lines.append(self._note(_issued_line(action)))
            elif isinstance(action, SkipTickets):
                lines += [self._note(line) for line in _skipped_lines(action, seq, data_digest)]
            # Ended by the rules, not by its record.
            elif isinstance(action, ForgetTicket) and action.reason:
                line = LedgerLine(state=action.outcome, ticket=action.number, reason=action.reason)
                lines.append(self._ended(action, line))
            elif isinstance(action, ForgetTicket):
                end_reason = reason or ("zero_variance" if action.outcome == "filtered" else "late")
                line = new_line(
                    state=action.outcome,
                    ticket=action.number,
                    oldest=oldest,
                    newest=newest,
                    reason=end_reason,
                )
                lines.append(self._ended(action, line))
        return lines

    def step(
        self,
        entries: Sequence[LedgerEntry],
        trained_tickets: Collection[int],
        actions: Sequence[Action],
        ledger: Ledger,
    ) -> list[LedgerLine]:
        """Return the lines of a completed step.

        Args:
            taken: its groups.
            trained: tickets of the groups that were trained on; the others count as filtered.
            actions: the ledger's answer.
            ledger: after the step.
        """
        step = ledger.state.version
        lines = []
        for entry in entries:
            arrival = LedgerLine(
                state="arrived", ticket=entry.number, seq=entry.seq, oldest=entry.oldest_version
            )
            line = replace(self._arrived.get(entry.number, arrival), step=step, state="trained")
            if entry.number not in trained_tickets:
                line = replace(line, state="filtered", reason="not_selected")
            lines.append(self._note(line))
        for action in actions:
            if isinstance(action, IssueTicket):
                lines.append(self._note(_issued_line(action)))
            # The group became too old for the next step.
            elif isinstance(action, ForgetTicket):
                lines.append(
                    self._ended(
                        action,
                        LedgerLine(state=action.outcome, ticket=action.number, reason="late"),
                    )
                )
        return [*lines, self._note(boundary_line(ledger))]

    def lost(self, entries: Sequence[LedgerEntry]) -> list[LedgerLine]:
        """Return the lines of arrived groups that the broker has lost."""
        arrived = [
            self._arrived[entry.number] for entry in entries if entry.number in self._arrived
        ]
        return [
            self._note(
                LedgerLine(
                    state="lost",
                    ticket=line.ticket,
                    seq=line.seq,
                    digest=line.digest,
                    reason=LOST,
                )
            )
            for line in arrived
        ]

    def begin(self, actions: Sequence[Action], ledger: Ledger) -> list[LedgerLine]:
        """Return the lines of opening the credit; none if the newest boundary is the same."""
        end = boundary_line(ledger)
        issued = [
            self._note(_issued_line(action))
            for action in actions
            if isinstance(action, IssueTicket)
        ]
        return [*issued, self._note(end)] if issued or end != self.end else []

    def summary(self, rules: TicketRules) -> LedgerLine:
        """Return the first line of a file from the newest boundary on, with the rules in force."""
        return replace(
            self.end,
            state="summary",
            rules=rules.plain(),
            held=tuple(self._arrived.values()),
            reasons=dict(self._reasons),
        )

    def _ended(self, action: ForgetTicket, line: LedgerLine) -> LedgerLine:
        """Return the line of an ended ticket, from the record of its group if one had arrived."""
        if (arrival := self._arrived.get(action.number)) is not None:
            line = replace(arrival, state=action.outcome, reason=action.reason or "late")
        return self._note(line)

    def _note(self, line: LedgerLine) -> LedgerLine:
        """Update the state from a new or read line, and return it."""
        if line.state == "arrived":
            self._arrived[line.ticket] = line
        elif line.state in (*FINAL, "lost"):
            self._arrived.pop(line.ticket, None)
            if line.state == "dead":
                self._reasons[line.reason] = self._reasons.get(line.reason, 0) + 1
        elif line.state == "boundary":
            self.end = line
        elif line.state == "summary":
            self.end = replace(line, state="boundary", rules={}, held=(), reasons=None)
            self._arrived = {arrival.ticket: arrival for arrival in line.held}
            self._reasons = dict(line.reasons or {})
        return line


def _issued_line(action: IssueTicket) -> LedgerLine:
    ticket = action.ticket
    return LedgerLine(
        state="issued",
        ticket=ticket.number,
        domain=ticket.domain,
        task_index=ticket.task_index,
        min_version=ticket.min_version,
    )


def _skipped_lines(action: SkipTickets, seq: int, data_digest: str) -> list[LedgerLine]:
    """Return the lines of skipped tickets; the record is that of the last one."""
    lines = []
    for number in range(action.first, action.last + 1):
        dead = LedgerLine(state="dead", ticket=number, reason=LOST)
        if number == action.last:
            dead = replace(dead, seq=seq, digest=data_digest)
        lines += [LedgerLine(state="issued", ticket=number), dead]
    return lines


def boundary_line(ledger: Ledger) -> LedgerLine:
    """Return the line that ends a step."""
    state = ledger.state
    rules = ledger.rules
    return LedgerLine(
        state="boundary",
        step=state.version,
        seq=state.position,
        counts=ledger.counts(),
        groups_per_step=rules.groups_per_step,
        max_staleness=rules.max_staleness,
    )


def is_boundary_of(line: LedgerLine, ledger: Ledger) -> bool:
    """Return whether the line is the boundary at which the ledger stands, or the summary of it."""
    state = ledger.state
    position = (line.step, line.seq, line.counts.get("issued"))
    return line.state in ("boundary", "summary") and position == (
        state.version,
        state.position,
        state.issued,
    )


def final_counts(lines: Iterable[LedgerLine]) -> tuple[dict[str, int], dict[str, int]]:
    """Return the ledger's counts at the file's end, and the dead tickets by reason.

    A boundary holds the ledger's counts, and the lines after it the changes, so the newest file
    alone is enough.
    """
    counts = dict.fromkeys(("issued", *FINAL, "open", "duplicate", "unknown"), 0)
    reasons: dict[str, int] = {}
    line = None
    for line in lines:
        if line.state == "summary":
            reasons = dict(line.reasons or {})
        if line.counts:
            counts |= line.counts
        elif line.state in counts:
            counts[line.state] += 1
            if line.state in FINAL:
                counts["open"] -= 1
            elif line.state == "issued":
                counts["open"] += 1
        if line.state == "dead":
            reasons[line.reason] = reasons.get(line.reason, 0) + 1
    return counts if line else {}, reasons


def encode_lines(lines: Sequence[LedgerLine]) -> bytes:
    """Encode lines as the file holds them."""
    return b"".join(_ENCODER.encode(line) + b"\n" for line in lines)


def decode_line(row: bytes) -> LedgerLine:
    """Decode one line without its newline.

    Raises:
        ValueError: if it is not a line.
    """
    try:
        return _DECODER.decode(row)
    except RecursionError:
        raise ValueError("nested too deeply") from None
