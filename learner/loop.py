"""The learner's loop: reads records, performs what the ledger decides, and completes steps."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, Final

from broker.contract import wire
from broker.contract.streams import SAMPLES
from broker.jetstream.bus import Bus, LogRecord
from broker.runtime.process import Stop
from learner.consumer import RecordConsumer, accepted_upload
from learner.credit.ledger import FILTERED, Action, ForgetTicket, IssueTicket, Ledger, RefuseRecord
from learner.credit.record_intake import RecordIntake
from learner.credit.records import LedgerRecorder
from learner.credit.recovery import RecoveryResult
from learner.credit.tickets import TicketIssuer
from learner.evaluation.evaluator import Evaluator
from learner.give_up import FailureMonitor
from learner.reporting.metrics_writer import MetricsWriter
from learner.training import TrainingResult, TrainingThread

log = logging.getLogger(__name__)

# A turn on a shared device ends if no record comes within this time and none is in the log, or if a
# record in the log cannot be read within the second one.
LINGER_S: Final = 0.02
READ_WITHIN_S: Final = 2.0
# Records that are read ahead: what a link of 1 Gbit/s brings in 0.2 s.
WINDOW_BYTES: Final = 24 << 20


class TrainingLoop:
    """Training loop from the ledger's position to the last step.

    Args:
        resumed: the groups that the ledger still holds.
        offer: offers the weights of a version, in the training thread; returns the seconds it took.
        checkpoint: writes the ledger as dumped at the last step boundary, with its weights.
        checkpoint_every: steps between two checkpoints, 0 never.
        requested: set when the operator asks for a checkpoint.
        between_steps: writes that checkpoint, if nothing of the next step was trained on yet.
        failure_monitor: receives the outcome of every group; its verdict stops the loop.
        steps: of this learner's configuration. The log may hold groups for more, before the record
            of the new rules.
    """

    def __init__(
        self,
        bus: Bus,
        ledger: Ledger,
        training: TrainingThread,
        *,
        issuer: TicketIssuer,
        evaluator: Evaluator,
        metrics_writer: MetricsWriter,
        records: LedgerRecorder,
        stop: Stop,
        resumed: RecoveryResult,
        offer: Callable[[int], float],
        fleet_values: Callable[[], dict[str, float]],
        checkpoint: Callable[[dict[str, object]], Awaitable[None]],
        checkpoint_every: int,
        requested: asyncio.Event,
        between_steps: Callable[[dict[str, object]], Awaitable[None]],
        failure_monitor: FailureMonitor,
        steps: int,
    ) -> None:
        self._bus = bus
        self._ledger = ledger
        self._training = training
        self._issuer = issuer
        self._consumer = RecordConsumer(ledger, training)
        self._evaluator = evaluator
        self._metrics_writer = metrics_writer
        self._records = records
        self._stop = stop
        self._resumed = resumed
        self._offer = offer
        self._fleet_values = fleet_values
        self._checkpoint = checkpoint
        self._checkpoint_every = checkpoint_every
        self._filtered_before = ledger.counts()["filtered"]
        self._requested = requested
        self._between_steps = between_steps
        self._catch_up_to = 0
        self._steps = steps
        self._failure_monitor = failure_monitor
        self._offered = -1
        # Unix seconds at which the record of a traced ticket was read.
        self._arrived: dict[int, float] = {}
        self._began = time.monotonic()
        self._between_s = 0.0  # between the last two steps, with new tickets already out
        self.boundary = ledger.dump()  # at the last step boundary, which a checkpoint holds

    async def run(self) -> bool:
        """Train until every step is done (True) or a stop is requested (False).

        Raises:
            LostState: if the log ends before the ledger's position, or was trimmed beyond it.
        """
        self._consumer.resume(self._resumed.groups)
        opening_actions = self._ledger.open_credit()
        self.boundary = self._ledger.dump()
        # Recorded before a ticket goes out: hubs must not know tickets that the files lack.
        await self._records.began(opening_actions, self._resumed.lost)
        for ticket in self._resumed.unissued:
            self._issuer.put(ticket)
        self._perform(opening_actions)
        self._catch_up_to = await self._bus.last_seq(SAMPLES)
        await self._offer_if_current()
        self._evaluator.step_completed(self._ledger.state.version, self._steps)
        self._began = time.monotonic()
        position = self._ledger.state.position
        unread = self._bus.read_log(
            SAMPLES, position + 1, wanted=self._ledger.awaits, window_bytes=WINDOW_BYTES
        )
        async with aclosing(unread) as records:
            while not self._is_done:
                if not await (self._end_step() if self._ledger.full else self._apply_next(records)):
                    return False
        return True

    @property
    def _is_done(self) -> bool:
        """Whether every step of this learner's settings is done, though not yet read in the log."""
        return self._ledger.state.version >= self._steps

    # ----------------------------------------------------------------------------------------------
    # records

    async def _apply_next(self, records: AsyncGenerator[LogRecord, None]) -> bool:
        """Apply the next record and drop its bytes; return False if a stop came first."""
        if (entry := await self._next(records)) is None:
            return False
        await self._apply_record(entry)
        return True

    async def _read(self, records: AsyncGenerator[LogRecord, None]) -> LogRecord:
        # A group that is read stays in memory until it is trained on.
        await self._training.has_room()
        return await anext(records)

    async def _next(self, records: AsyncGenerator[LogRecord, None]) -> LogRecord | None:
        """Return the next record, or None once a stop is requested."""
        next_record = asyncio.ensure_future(self._read(records))
        stop_request = asyncio.ensure_future(self._stop.asked.wait())
        try:
            events: set[asyncio.Future[Any]] = {next_record, stop_request, self._training.failed}
            if self._training.on_device and not await self._has_unread_record(events):
                await self._training.leave()
            while not any(event.done() for event in events):
                await self._wait_or_checkpoint(events)
            if self._training.failed.done():
                self._training.failed.result()
            return (
                next_record.result()
                if next_record.done() and not self._stop.asked.is_set()
                else None
            )
        finally:
            for future in (next_record, stop_request):
                future.cancel()
            await asyncio.gather(next_record, stop_request, return_exceptions=True)

    async def _wait_or_checkpoint(self, events: set[asyncio.Future[Any]]) -> None:
        """Wait for one of the events, or take a checkpoint that the operator requests."""
        requested = asyncio.ensure_future(self._requested.wait())
        try:
            await asyncio.wait({*events, requested}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            requested.cancel()
        if self._requested.is_set() and not any(event.done() for event in events):
            self._requested.clear()
            # The model is as it was at the boundary.
            if not self._ledger.state.taken:
                await self._between_steps(self.boundary)

    async def _has_unread_record(self, events: set[asyncio.Future[Any]]) -> bool:
        """Return whether an event comes soon, because the log holds an unread record."""
        deadline = time.monotonic() + READ_WITHIN_S
        while time.monotonic() < deadline:
            finished, _ = await asyncio.wait(
                events, timeout=LINGER_S, return_when=asyncio.FIRST_COMPLETED
            )
            if finished or await self._bus.last_seq(SAMPLES) <= self._ledger.state.position:
                return bool(finished)
        return False

    async def _apply_record(self, entry: LogRecord) -> None:
        """Apply one record."""
        domain = ticket.domain if (ticket := self._ledger.state.live.get(entry.ticket)) else ""
        intake, actions = self._consumer.apply(entry)
        if (parted := accepted_upload(entry, intake, actions)) is not None:
            self._bus.drop_other_parts(parted)
        if problem := intake.problem:
            log.warning("record %d of the samples log: %s", entry.seq, problem)
            await self._bus.dead_letter(
                SAMPLES, seq=entry.seq, ticket=entry.ticket, reason=problem, data=entry.data
            )
        await self._records.consumed(entry, intake, actions)
        # Older records say nothing about the code that runs now.
        is_new = entry.seq > self._catch_up_to
        if any(isinstance(action, ForgetTicket) and action.outcome == "dead" for action in actions):
            self._note_failure(entry, intake, domain if is_new else None)
        elif is_new and not any(isinstance(action, RefuseRecord) for action in actions):
            if intake.group is not None:
                self._failure_monitor.worked(domain)
                self._metrics_writer.showcase.accepted(intake.group)
            elif isinstance(entry.message, wire.Closed) and entry.message.reason == FILTERED:
                self._failure_monitor.worked(domain)
        forgotten = [action.number for action in actions if isinstance(action, ForgetTicket)]
        self._trace_record(
            entry.ticket, [action for action in actions if isinstance(action, ForgetTicket)]
        )
        message = entry.message
        if isinstance(message, wire.Closed) and forgotten:
            self._log_closed(message)
            # The hub that closes a filtered ticket has its only group.
            if message.reason != FILTERED:
                self._issuer.withdraw(message.ticket, is_queued=message.by == self._bus.name)
        elif isinstance(message, wire.RulesChange):
            self._log_rules_change(message, len(forgotten))
            # No hub ended these tickets, so hubs may still hold them.
            for number in forgotten:
                self._issuer.withdraw(number)
        self._perform(actions)
        await self._offer_if_current()

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, IssueTicket):
                self._issuer.put(action.ticket)
        self._consumer.perform(actions, is_settled=self._ledger.state.position >= self._catch_up_to)

    def _note_failure(self, entry: LogRecord, intake: RecordIntake, domain: str | None) -> None:
        """Show a failure in the live view; stop a run that only fails, where ``domain`` is set."""
        if isinstance(closed := entry.message, wire.Closed):
            reason = closed.reason
            detail = closed.detail
            by = closed.by
        else:
            reason = "malformed"
            detail = intake.problem
            by = self._bus.name
        self._metrics_writer.failure = {"failure": f"{reason}: {detail}", "failed_by": by}
        if domain is not None and (verdict := self._failure_monitor.failed(domain, reason, detail)):
            self._stop.request(verdict)

    def _log_closed(self, closed: wire.Closed) -> None:
        """Log the first, tenth, hundredth … of each reason, to limit the output."""
        if closed.reason == FILTERED:
            return
        count = str(self._ledger.state.reasons[closed.reason])
        if count.rstrip("0") == "1":
            ticket = f"ticket {closed.ticket} ({closed.domain})"
            reason = f"{closed.reason}, the {count}. so far"
            log.warning("%s closed by %s: %s: %s", ticket, closed.by, reason, closed.detail)

    def _log_rules_change(self, change: wire.RulesChange, num_dropped: int) -> None:
        if num_dropped:
            log.warning(
                "settings of epoch %d are in force: %d open tickets dropped, "
                "which they do not allow",
                change.epoch,
                num_dropped,
            )
        else:
            log.info("settings of epoch %d are in force", change.epoch)

    # ----------------------------------------------------------------------------------------------
    # steps

    async def _end_step(self) -> bool:
        """Complete the full step and begin the next; return False if a stop came first."""
        if not await self._finish_first_evaluation():
            return False
        waited_s = time.monotonic() - self._began
        completed = await self._consumer.complete()
        if completed is None:
            return False
        result = completed.result
        actions = completed.actions
        ended_at = time.monotonic()
        if verdict := self._failure_monitor.stepped(
            is_skipped=result.is_skipped, problem=result.problem
        ):
            self._stop.request(verdict)
        self.boundary = self._ledger.dump()
        trained_at = time.time()
        await self._records.completed(completed.entries, result.tickets, actions, result.tokens)
        # A last version is offered though rules that follow it in the log are never read.
        copy_s = await (self._offer_version() if self._is_done else self._offer_if_current())
        self._trace_step(
            [entry.number for entry in completed.entries],
            trained_at - result.busy_s,
            trained_at,
            copy_s,
        )
        self._perform([action for action in actions if isinstance(action, IssueTicket)])
        issued_at = time.monotonic()
        step = self._ledger.state.version
        timings = {"time/publish_step": issued_at - ended_at, "time/between_steps": self._between_s}
        line = self._metrics_writer.compose(self._step_values(result, waited_s, copy_s) | timings)
        self._evaluator.step_completed(step, self._steps)
        if self._is_done:
            # The evaluation needs the rollout servers on the device.
            await self._training.leave()
            with self._training.spans.work("evaluate", step=step):
                await self._evaluator.drain(self._stop.asked)
        await self._metrics_writer.write(line | self._evaluator.take(last=self._is_done))
        if self._checkpoint_every and step % self._checkpoint_every == 0 and not self._is_done:
            await self._checkpoint(self.boundary)
        self._between_s = time.monotonic() - issued_at
        self._perform([action for action in actions if not isinstance(action, IssueTicket)])
        return True

    async def _finish_first_evaluation(self) -> bool:
        """Wait for the evaluation of version 0, if it runs; return False if a stop came first.

        Servers keep only the newest weights: once version 1 is on offer, nothing measures
        version 0. Later evaluations do not wait, because that would stop training every time.
        """
        if self._ledger.state.version or not self._evaluator.is_measuring(0):
            return True
        # A resumed learner may have a whole step in the log, and has not offered its version.
        await self._offer_version()
        # The evaluation needs the rollout servers on the device.
        await self._training.leave()
        measured = asyncio.ensure_future(self._evaluator.wait_until_measured(0, self._stop.asked))
        try:
            events: set[asyncio.Future[Any]] = {measured, self._training.failed}
            await asyncio.wait(events, return_when=asyncio.FIRST_COMPLETED)
        finally:
            measured.cancel()
            await asyncio.gather(measured, return_exceptions=True)
        return not self._stop.asked.is_set()

    def _trace_record(self, ticket: int, endings: list[ForgetTicket]) -> None:
        """Send the ends of traced tickets, and note when the record of one was read."""
        if (traces := self._training.spans.traces) is None:
            return
        if traces.samples(ticket):
            self._arrived.setdefault(ticket, time.time())
        for action in endings:
            self._arrived.pop(action.number, None)
            traces.end(action.number, action.outcome)

    def _trace_step(
        self, tickets: list[int], began_at: float, ended_at: float, copy_s: float
    ) -> None:
        """Send the spans of a step's traced tickets: the wait, the training, the weights' offer."""
        if (traces := self._training.spans.traces) is None:
            return
        step = self._ledger.state.version
        now = time.time()
        for ticket in filter(traces.samples, tickets):
            arrived = self._arrived.pop(ticket, began_at)
            traces.add("consume", ticket, arrived, max(arrived, began_at))
            traces.add("train", ticket, began_at, ended_at, step=step)
            traces.add("weights", ticket, now - copy_s, now, version=step)
            traces.end(ticket, "trained")

    def _step_values(
        self, result: TrainingResult, waited_s: float, copy_s: float
    ) -> dict[str, float]:
        now = time.monotonic()
        wall_s = max(now - self._began, 1e-9)
        self._began = now
        num_filtered = self._ledger.counts()["filtered"]
        new_filtered = num_filtered - self._filtered_before
        self._filtered_before = num_filtered
        values = {
            "trainer/idle_ratio": min(1.0, max(0.0, 1.0 - (result.busy_s + copy_s) / wall_s)),
            "perf/tokens_per_s": result.num_tokens / wall_s,
            "perf/samples_per_s": result.num_samples / wall_s,
            "filter/count": float(new_filtered),
            "time/step": wall_s,
            "time/wait_for_batch": waited_s,
            "time/train": result.busy_s,
            "time/finish_train": result.finish_s,
            "time/offer_weights": copy_s,
        }
        return result.values | values | self._fleet_values()

    async def _offer_if_current(self) -> float:
        """Offer a new version once the log is read; return the seconds that this took."""
        if self._ledger.state.position < self._catch_up_to:
            return 0.0
        return await self._offer_version()

    async def _offer_version(self) -> float:
        """Offer the version unless it is on offer; return the seconds that this took."""
        version = self._ledger.state.version
        if version == self._offered:
            return 0.0
        self._offered = version
        return await self._training.call(lambda: self._offer(version))
