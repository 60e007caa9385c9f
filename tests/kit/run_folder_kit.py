"""A learner without a model and a broker without a network: writes run folders as real ones do,
byte for byte the same records.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import yaml
from bare_checkpoints import write_bare_checkpoint

from broker.contract import codec, wire
from broker.contract.streams import SAMPLES
from broker.jetstream.bus import LogRecord
from broker.jetstream.delivery import decode_message
from broker.runtime.process import Stop
from learner.algorithm.selection import num_kept
from learner.checkpoints import checkpoint
from learner.config import SamplesSection
from learner.credit import ledger_segments, record_intake
from learner.credit.ledger import Action, IssueTicket, Ledger, LedgerEntry
from learner.credit.ledger_file import LedgerLine, digest_record
from learner.credit.records import LedgerRecorder
from learner.credit.ticket_rules import DomainRule, TicketRules
from learner.reporting.metrics import MetricsFile, count_tickets
from rlearner_text.tokenizer import Tokenizer

STEPS = 4
Answer = Callable[[wire.Ticket], list[wire.Message | bytes]]


class Killed(Exception):
    """The learner died here."""


def rules(**more: Any) -> TicketRules:
    given: dict[str, Any] = {
        "steps": STEPS,
        "groups_per_step": 2,
        "max_staleness": 1,
        "on_late": "drop",
        "seed": 0,
    }
    return TicketRules(**{**given, **more}, domains=(DomainRule("lake", 1.0, 2, 2, 1.0),))


def trajectory(
    episode: int, reward: float, runs: list[int], servers: tuple[str, ...] = ("s1",)
) -> wire.Trajectory:
    """Two tokens of prompt, then one turn for each server, of equal length."""
    sampled = sum(runs[1::2])
    each = sampled // len(servers)
    turns = [
        wire.Turn(
            start=2 + i * each,
            end=2 + (i + 1) * each,
            reward=reward,
            valid=True,
            finish_reason="stop",
            server=server,
        )
        for i, server in enumerate(servers)
    ]
    return wire.Trajectory(
        episode=episode,
        token_ids=wire.column([3, 7] + [4] * sampled, "<i4"),
        loss_mask=wire.column([0, 0] + [1] * sampled, "|u1"),
        logprobs=wire.column([0.0, 0.0] + [-1.0] * sampled, "<f4"),
        version_runs=wire.column(runs, "<i4"),
        turns=turns,
        reward=reward,
        reward_parts={"env": reward},
        success=reward > 0,
        end="terminated",
    )


def group(ticket: wire.Ticket, version: int | None = None, **more: Any) -> wire.Group:
    """The group of a ticket, all its tokens of its own ``min_version``, or of ``version``."""
    own = ticket.min_version if version is None else version
    given: dict[str, Any] = {
        "ticket": ticket.number,
        "domain": ticket.domain,
        "task_index": ticket.task_index,
        "min_version": ticket.min_version,
        "hub": "hub-1",
        "deliveries": 1,
        "pools": [],
        "trajectories": [trajectory(0, 0.0, [own, 2]), trajectory(1, 1.0, [own, 4])],
    }
    return wire.Group(**given | more)


def eventful(ticket: wire.Ticket) -> list[wire.Message | bytes]:
    """Something of everything: bytes that are no message, duplicates, closings, a group of tokens
    that are too old.
    """
    good = group(ticket)
    match ticket.number:
        case 1:
            return [b"\x81no message", good]
        case 2:
            return [good, good]
        case 3:
            return [wire.Closed(ticket=3, domain="lake", reason="late", detail="", by="hub-1")]
        case 4:
            return [
                wire.Closed(
                    ticket=4, domain="lake", reason="env_error", detail="it broke", by="hub-1"
                )
            ]
        case 9:
            return [group(ticket, 0)]
        case _:
            return [good]


def group_only(ticket: wire.Ticket) -> list[wire.Message | bytes]:
    """A good group for every ticket."""
    return [group(ticket)]


def out_of_order(ticket: wire.Ticket) -> list[wire.Message | bytes]:
    """5 and 6, which may wait, come before 3 and 4, which may not."""
    if ticket.number in (3, 4):
        return []
    late = [
        msgspec.structs.replace(ticket, number=n, task_index=n - 1, min_version=0)
        for n in (3, 4)
        if ticket.number == 6
    ]
    return [group(one) for one in (ticket, *late)]


def ledger_files(run: Path) -> dict[str, bytes]:
    """By name, the bytes of each ledger file of a run, oldest first."""
    return {
        path.name: path.read_bytes()
        for _, path in ledger_segments.segment_files(run / ledger_segments.FOLDER)
    }


def ledger_lines(run: Path) -> list[LedgerLine]:
    """Every line of a run's ledger files, which can all be read."""
    lines = ledger_segments.LedgerLines(run / ledger_segments.FOLDER)
    found = list(lines)
    assert lines.problem == ""
    return found


class World:
    """One run: its folder, its log, and what a tap would have seen.

    Args:
        segment_bytes: a ledger file is left at the first boundary behind this size.
    """

    def __init__(
        self,
        folder: Path,
        answer: Answer = eventful,
        *,
        keep: bool | int = True,
        segment_bytes: int = ledger_segments.MAX_BYTES,
        **more: Any,
    ) -> None:
        self.folder, self.answer, self.keep, self.rules = folder, answer, keep, rules(**more)
        self.segment_bytes = segment_bytes
        self.log: list[LogRecord] = []
        self.tap: list[dict[str, Any]] = [{"n": 1, "event": "open"}]
        self.tickets = 0
        folder.mkdir(parents=True, exist_ok=True)
        self.config = {"run": {"name": folder.name}, "train": {"steps": self.rules.steps}}
        (folder / "config.yaml").write_text(yaml.safe_dump(self.config))

    async def learn(self, *, die_at: int = 0, checkpoint_every: int = 2) -> None:
        """One life of the learner, from the newest checkpoint on.

        Raises:
            Killed: before record ``die_at`` was applied.
        """
        found, epoch = checkpoint.newest_checkpoint(self.folder / "checkpoints"), 0
        ledger = Ledger.load(found.ledger) if found else Ledger(self.rules)
        samples = SamplesSection(keep=self.keep, max_file_mib=0.001)
        records = LedgerRecorder(
            self.folder, ledger, samples, Stop(), max_ledger_bytes=self.segment_bytes
        )
        metrics = MetricsFile(self.folder / "metrics.jsonl", ledger.state.version)
        if ledger.rules != self.rules:
            epoch = len(self.log) + 1
            self.store(0, wire.RulesChange(epoch=epoch, rules=self.rules.plain()))
        try:
            opened = ledger.open_credit()
            await records.began(opened)
            self._publish(opened)
            while not (ledger.done and ledger.state.rules_epoch >= epoch):
                if ledger.full:
                    taken = list(ledger.state.taken)
                    actions = ledger.complete_step()
                    await records.completed(taken, self._trained(taken), actions)
                    self._publish(actions)
                    self._write_line(metrics, ledger, [entry.oldest_version for entry in taken])
                    if ledger.state.version % checkpoint_every == 0 or ledger.done:
                        await records.sync()
                        self._checkpoint(ledger)
                    continue
                entry = self.log[ledger.state.position]
                if entry.seq == die_at:
                    raise Killed
                read = record_intake.read_record(entry, ledger, 100)
                actions = ledger.apply(read.record, entry.seq)
                await records.consumed(entry, read, actions)
                self._publish(actions)
        finally:
            records.close()
            metrics.close()

    def _trained(self, taken: list[LedgerEntry]) -> list[int]:
        return [entry.number for entry in taken[: num_kept(len(taken), self.rules.keep_fraction)]]

    def _publish(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, IssueTicket) and action.ticket.number > self.tickets:
                ticket = action.ticket
                self.tickets = ticket.number
                content = {
                    name: getattr(ticket, name) for name in ("domain", "task_index", "min_version")
                }
                self._see(
                    "ticket",
                    ticket=ticket.number,
                    digest=digest_record(codec.encode(ticket)),
                    **content,
                )
                for one in self.answer(ticket):
                    self.store(ticket.number, one)

    def store(self, ticket: int, one: wire.Message | bytes) -> None:
        """Append to the log; the tap looks on."""
        data = one if isinstance(one, bytes) else codec.encode(one)
        message, error = decode_message(data, SAMPLES.messages)
        self.log.append(LogRecord(len(self.log) + 1, message, error, ticket, data))
        bounds = (
            record_intake.version_bounds([message]) if isinstance(message, wire.Group) else None
        )
        versions = {"oldest": bounds[0], "newest": bounds[1]} if bounds else {}
        self._see(
            "sample",
            ticket=ticket,
            digest=digest_record(data),
            kind=type(message).__name__,
            **versions,
        )

    def _see(self, event: str, **values: Any) -> None:
        self.tap.append({"n": len(self.tap) + 1, "event": event, **values})

    def _write_line(self, metrics: MetricsFile, ledger: Ledger, oldest: list[int]) -> None:
        step = ledger.state.version
        counts = {
            name: int(value)
            for name, value in count_tickets(ledger).items()
            if name.startswith("ticket/")
        }
        metrics.write(
            {"step": step, "time": 1e9 + step, "staleness/max": step - 1 - min(oldest), **counts}
        )

    def _checkpoint(self, ledger: Ledger) -> None:
        write_bare_checkpoint(self.folder / "checkpoints", ledger.dump())


SEEN = (
    "<|im_user|>PF\nHG<|im_end|><|im_assistant|>",
    "<|im_user|>SP\nHG<|im_end|><|im_assistant|>",
)


def two_turns(tokenizer: Tokenizer, episode: int = 0) -> wire.Trajectory:
    """Says R, then DX; the version changes between D and X. A reward hub added 0.25 and took the
    environment's 1.5.
    """
    ids: list[int] = []
    mask: list[int] = []
    spans = []
    for seen, said in zip(SEEN, ("R", "DX"), strict=True):
        shown, spoken = tokenizer.encode(seen), tokenizer.encode(said)
        spans.append((len(ids) + len(shown), len(ids) + len(shown) + len(spoken)))
        ids += shown + spoken
        mask += [0] * len(shown) + [1] * len(spoken)
    values = iter([-0.5, -0.25, -1.0])
    turns = [
        wire.Turn(
            start=start, end=end, reward=reward, valid=valid, finish_reason="stop", server="s1"
        )
        for (start, end), reward, valid in zip(spans, (0.5, 1.0), (True, False), strict=True)
    ]
    return wire.Trajectory(
        episode=episode,
        token_ids=wire.column(ids, "<i4"),
        loss_mask=wire.column(mask, "|u1"),
        logprobs=wire.column([next(values) if one else 0.0 for one in mask], "<f4"),
        version_runs=wire.column([0, 2, 1, 1], "<i4"),
        turns=turns,
        reward=1.75,
        reward_parts={"env": 1.5, "length": 0.25},
        success=True,
        end="terminated",
        response="DX",
    )
