"""Answers the operator's requests for a checkpoint or an evaluation now, outside the schedule.

Nothing that is trained depends on them. A poll repeats the step of an earlier reply, so a repeated
request, after a lost reply or by two people, begins nothing twice.
"""

from __future__ import annotations

import asyncio
import logging

from broker.contract import wire
from broker.contract.streams import REQUESTS
from broker.jetstream.bus import Bus
from broker.jetstream.core_messages import answer_requests
from broker.runtime.process import Stop
from learner.checkpoints.saver import CheckpointSaver
from learner.credit.ledger import Ledger
from learner.evaluation.evaluator import Evaluator
from learner.reporting.status import ID

log = logging.getLogger(__name__)


class OperatorRequests:
    """Answers requests; the loop takes the checkpoints, because only it knows when a step ends.

    Args:
        num_tasks: tasks of an evaluation per domain, None if the run has none.
    """

    def __init__(
        self,
        bus: Bus,
        ledger: Ledger,
        saver: CheckpointSaver,
        evaluator: Evaluator,
        stop: Stop,
        num_tasks: int | None,
    ) -> None:
        self._bus = bus
        self._ledger = ledger
        self._saver = saver
        self._evaluator = evaluator
        self._stop = stop
        self._num_tasks = num_tasks

    async def serve(self) -> None:
        """Answer requests until cancelled."""
        subscription = await answer_requests(self._bus, REQUESTS, ID, self.answer)
        try:
            await asyncio.Event().wait()
        finally:
            await subscription.close()

    async def answer(self, message: wire.Message) -> wire.OperatorReply | None:
        """Return the state of a request, and begin it unless it asks about an earlier one."""
        if not isinstance(message, wire.OperatorRequest):
            return None
        if self._stop.asked.is_set():
            return self._refused("the learner is stopping")
        if message.action == "checkpoint":
            return self._checkpoint(message.step)
        return self._evaluate(message.step)

    def _checkpoint(self, step: int) -> wire.OperatorReply:
        saver = self._saver
        version = self._ledger.state.version
        is_new = step < 0
        if is_new:
            step = version + 1 if self._ledger.state.taken else version
        if saver.written >= (version if is_new else step):
            return wire.OperatorReply(
                state="done", step=saver.written, detail=f"step {saver.written} is on disk"
            )
        if saver.writing >= (version if is_new else step):
            return wire.OperatorReply(
                state="running", step=saver.writing, detail="it is being written"
            )
        if is_new:
            log.info("the operator asks for a checkpoint after step %d", version)
            saver.request()
        elif not saver.pending:
            return self._refused(
                f"no checkpoint of step {step} is pending: the learner was restarted; ask again"
            )
        if saver.problem:
            return wire.OperatorReply(state="waiting", step=step, detail=saver.problem)
        detail = "it is taken before the next step begins"
        if step > version:
            detail = f"it is taken when step {step} ends"
        return wire.OperatorReply(state="waiting", step=step, detail=detail)

    def _evaluate(self, step: int) -> wire.OperatorReply:
        if self._num_tasks is None:
            return self._refused(
                "this run has no held-out tasks: set eval.tasks, or eval.every_steps"
            )
        is_new = step < 0
        if is_new:
            step = self._ledger.state.version
        if is_new and not self._evaluator.has_begun(step):
            log.info("the operator asks for an evaluation after step %d", step)
            self._evaluator.start(step, wire.ACTOR, min_version=step)
        state, detail = self._evaluator.progress(step)
        return wire.OperatorReply(state=state, step=step, detail=detail)

    def _refused(self, reason: str) -> wire.OperatorReply:
        return wire.OperatorReply(state="refused", step=self._ledger.state.version, detail=reason)
