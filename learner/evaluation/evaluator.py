"""Runs evaluations during training: issues tickets, reads records, keeps results."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Literal

from broker.contract import wire
from broker.contract.streams import EVALS, EVALTICKETS
from broker.contract.wire import ACTOR
from broker.jetstream.bus import Bus
from broker.runtime.presence import Roster
from broker.system.private_files import private_folder, private_write
from learner.credit.tickets import TicketIssuer
from learner.disk_retry import DiskRetry
from learner.evaluation.evaluation import Evaluation, EvaluationQueue
from learner.reporting.transcripts import TranscriptFactory

log = logging.getLogger(__name__)

TICK_S: Final = 0.5
# Evaluations of the actor, for comparison with others.
ACTORS_KEPT: Final = 4


class Evaluator:
    """Service around ``EvaluationQueue``.

    Args:
        folder: ``runs/<name>/evals``; one JSONL of episodes for each evaluation, for replays.
        baseline: a policy to evaluate once, as soon as a server offers it; empty: none.
        disk_retry: retries writes while the folder cannot be written.
        transcripts: makes the texts of evaluated episodes.
        opponents: policies to evaluate whenever the actor is, on the same tasks.
        show: receives the actor's rows once they are in their file; blocks, called in a thread.
        say: receives what training waits for, and an empty text when it goes on.
        every_s: seconds between two checks of the clock.
    """

    def __init__(
        self,
        bus: Bus,
        evaluations: EvaluationQueue,
        roster: Roster,
        folder: Path,
        baseline: str,
        disk_retry: DiskRetry,
        transcripts: TranscriptFactory,
        opponents: Sequence[str] = (),
        *,
        show: Callable[[int, list[dict[str, Any]]], None] = lambda step, rows: None,
        say: Callable[[str], None] = lambda text: None,
        every_s: float = TICK_S,
    ) -> None:
        self._bus = bus
        self._evaluations = evaluations
        self._roster = roster
        self._folder = folder
        self._baseline = baseline
        self._disk_retry = disk_retry
        self._transcripts = transcripts
        self._opponents = list(opponents)
        self._show = show
        self._say = say
        self._every_s = every_s
        self._actors: dict[int, Evaluation] = {}  # by step, the last few
        self._unsaved: list[Evaluation] = []  # those whose episodes are not in the folder yet
        self._restored: set[tuple[str, int]] = set()  # (policy, step), of an earlier learner
        self._withdrawn: set[int] = set()  # numbers of expired tickets that may be in the stream
        self._issuer = TicketIssuer(bus, EVALTICKETS)
        self.completed: list[Evaluation] = []  # those that are not in the metrics yet, oldest first
        self._changed = asyncio.Event()

    def services(self) -> list[Coroutine[Any, Any, None]]:
        """Return the coroutines for tickets, records and the clock, each until cancelled."""
        return [self._issuer.serve(), self._read(), self._tick()]

    @property
    def busy(self) -> bool:
        """Whether an evaluation is running, or not written to its file yet."""
        return bool(self._evaluations.pending or self._unsaved)

    def step_completed(self, step: int, last_step: int) -> None:
        """Begin the evaluations that are due after ``step`` optimizer steps."""
        if self._evaluations.due(step, last_step):
            if not self.has_begun(step):
                self.start(step, ACTOR, min_version=step)
            for policy in self._opponents:
                if (policy, step) in self._restored:
                    continue
                if policy in self._offered():
                    self.start(step, policy, min_version=0)
                else:
                    log.warning(
                        "no rollout server offers policy %s; it is not measured after step %d",
                        policy,
                        step,
                    )
        self._start_baseline(step)

    def take(self, *, last: bool) -> dict[str, float]:
        """Return one line's metrics: the actor's next result (the newest if ``last``), others."""
        actors = [result for result in self.completed if result.policy == ACTOR]
        others = [result for result in self.completed if result.policy != ACTOR]
        # A policy that is compared with the actor waits for its result.
        early = [
            result
            for result in others
            if result.policy in self._opponents and result.step not in self._actors and not last
        ]
        baselines = [result for result in others if result not in early]
        current = actors[-1:] if last else actors[:1]
        self.completed = [] if last else [*early, *actors[1:]]
        values: dict[str, float] = {}
        for evaluation in [*baselines, *current]:
            values |= evaluation.values()
        for baseline in baselines:
            actor = self._actors.get(baseline.step)
            if baseline.policy in self._opponents and actor is not None:
                values |= {
                    f"eval/{baseline.policy}/actor_{name}": value
                    for name, value in actor.ahead(baseline).items()
                }
        return values

    async def open(self) -> None:
        """Withdraw the tickets of an earlier learner; only the holder of the run may."""
        # Hubs would run them before this learner's.
        await self._bus.trim(EVALTICKETS, await self._bus.last_seq(EVALTICKETS) + 1)

    async def restore(
        self, version: int, written_since: Callable[[int], set[tuple[str, int]]]
    ) -> None:
        """Take over what an earlier learner has finished, so that nothing is measured twice.

        Files of later steps are removed: their policies are trained again.

        Args:
            version: of the policy with which this learner begins.
            written_since: returns (policy, step) of the evaluations in the metrics' lines from a
                step on; reads a file. Other results go into the next line.
        """
        finished = await asyncio.to_thread(self._read_files, version)
        first_step = min((result.step for result in finished), default=0)
        written = await asyncio.to_thread(written_since, first_step) if finished else set()
        for result in finished:
            label = (result.policy, result.step)
            self._restored.add(label)
            if result.policy == ACTOR:
                self._actors[result.step] = result
            if label not in written:
                self.completed.append(result)

    def _read_files(self, version: int) -> list[Evaluation]:
        """Return the newest evaluations up to a version, oldest first, and remove later ones."""
        steps: dict[int, list[tuple[Path, str]]] = {}
        for path in self._folder.glob("*-step-*.jsonl"):
            policy, _, number = path.stem.rpartition("-step-")
            if not number.isdecimal():
                continue
            step = int(number)
            if step > version:
                log.info("the evaluation after step %d is measured again with its step", step)
                path.unlink()
                continue
            if policy == self._baseline:
                self._baseline = ""
            steps.setdefault(step, []).append((path, policy))
        finished = []
        for step in sorted(steps)[-ACTORS_KEPT:]:
            for path, policy in sorted(steps[step]):
                try:
                    rows = [json.loads(row) for row in path.read_bytes().splitlines()]
                    evaluation = self._evaluations.restore(step, policy, rows)
                except (OSError, ValueError, KeyError, TypeError) as error:
                    # An earlier version has written it, or it is damaged.
                    log.warning("%s is measured again: %r", path.name, error)
                    continue
                if evaluation.measured:
                    finished.append(evaluation)
        return finished

    async def drain(self, stop: asyncio.Event) -> None:
        """Wait for running evaluations, ``eval.timeout_s`` at most, and their files, or a stop."""
        if self._baseline:
            log.warning("no rollout server offers policy %s; it is not measured", self._baseline)
        while self.busy and not stop.is_set():
            await self._wait_for_change()

    def is_measuring(self, step: int) -> bool:
        """Return whether the actor's evaluation after this step runs, or is not in its file yet."""
        return any(
            evaluation.policy == ACTOR and evaluation.step == step
            for evaluation in (*self._evaluations.pending, *self._unsaved)
        )

    async def wait_until_measured(self, step: int, stop: asyncio.Event) -> None:
        """Wait for the actor's evaluation after this step and its file, or a stop.

        It ends ``eval.timeout_s`` after its newest result at the latest.
        """
        while self.is_measuring(step) and not stop.is_set():
            state, detail = self.progress(step)
            if state == "running":
                self._say(f"waiting for the evaluation after step {step}: {detail}")
            await self._wait_for_change()
        self._say("")

    async def _wait_for_change(self) -> None:
        """Wait until an evaluation is in its file, or for one tick."""
        self._changed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._every_s):
                await self._changed.wait()

    def _start_baseline(self, step: int) -> None:
        if self._baseline in self._offered():
            policy = self._baseline
            self._baseline = ""
            self.start(step, policy, min_version=0)

    def _offered(self) -> set[str]:
        return {
            server.policy for server in self._roster.alive("rollout") if server.state == "serving"
        }

    def start(self, step: int, policy: str, min_version: int) -> None:
        """Begin one evaluation now."""
        tickets = self._evaluations.start(
            step, policy, min_version, asyncio.get_running_loop().time()
        )
        log.info("evaluating %s after step %d on %d tasks", policy, step, len(tickets))
        for ticket in tickets:
            self._issuer.put(ticket)

    def has_begun(self, step: int) -> bool:
        """Return whether the actor's evaluation after this step is running or a recent one."""
        return self._running(step) is not None or step in self._actors

    def progress(self, step: int) -> tuple[Literal["running", "done", "refused"], str]:
        """Return how far the actor's evaluation after this step is, and one line about it."""
        if (running := self._running(step)) is not None:
            num_measured = len(running.measured)
            num_tasks = num_measured + len(running.waiting)
            return "running", f"{num_measured} of {num_tasks} tasks are done"
        if (finished := self._actors.get(step)) is not None:
            values = finished.values()
            rate = values["eval/success_rate"]
            count = values["eval/num_episodes"]
            return "done", f"success rate {rate:.4f} on {count:.0f} episodes"
        return (
            "refused",
            f"no evaluation after step {step} is running, and none of the last {ACTORS_KEPT} was "
            "of it",
        )

    def _running(self, step: int) -> Evaluation | None:
        return next(
            (
                evaluation
                for evaluation in self._evaluations.pending
                if evaluation.policy == ACTOR and evaluation.step == step
            ),
            None,
        )

    async def _read(self) -> None:
        bus = self._bus
        async for entry in bus.read_log(
            EVALS, await bus.last_seq(EVALS) + 1, wanted=self._evaluations.may_come
        ):
            record: Any = entry.message
            if record is None:
                await bus.dead_letter(
                    EVALS, seq=entry.seq, ticket=entry.ticket, reason=entry.error, data=entry.data
                )
                if entry.ticket < 1:
                    continue
                ticket = entry.ticket
                detail = "the record does not decode"
                record = wire.Closed(
                    ticket=ticket, domain="unknown", reason="malformed", detail=detail, by=bus.name
                )
            if (finished := self._evaluations.apply(record)) is not None:
                await self._finish(finished)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            if self._withdrawn:
                await self._withdraw()
            for evaluation in self._evaluations.expire(asyncio.get_running_loop().time()):
                self._withdrawn |= evaluation.waiting
                text = "evaluation of %s after step %d ended with %d tasks missing"
                log.warning(text, evaluation.policy, evaluation.step, len(evaluation.waiting))
                await self._finish(evaluation)

    async def _withdraw(self) -> None:
        """Delete published tickets that expired; they would run before the next evaluation's."""
        last = await self._bus.last_seq(EVALTICKETS)
        published = sorted(number for number in self._withdrawn if number <= last)
        for number in published:
            await self._bus.delete(EVALTICKETS, number)
            await self._bus.remove_groups(number, evaluation=True)
        self._withdrawn -= set(published)

    async def _finish(self, evaluation: Evaluation) -> None:
        policy = evaluation.policy
        step = evaluation.step
        if values := evaluation.values():
            self.completed.append(evaluation)
            if policy == ACTOR:
                self._actors[step] = evaluation
                while len(self._actors) > ACTORS_KEPT:
                    del self._actors[min(self._actors)]
            rates = {
                name: round(value, 4)
                for name, value in values.items()
                if name.endswith("success_rate")
            }
            log.info("evaluation of %s after step %d", policy, step, extra=rates)
        else:
            log.warning(
                "evaluation of %s after step %d has no results: %s", policy, step, evaluation.closed
            )
        # Listed until the file is written: ``drain`` waits for it.
        self._unsaved.append(evaluation)
        rows = await self._disk_retry.in_thread(self._save_rows, evaluation)
        evaluation.rows.clear()
        if policy == ACTOR:
            await asyncio.to_thread(self._show, step, rows)
        self._unsaved.remove(evaluation)
        self._changed.set()
        await self._bus.trim_parts(EVALS, keep=self._evaluations.may_come)

    def _save_rows(self, evaluation: Evaluation) -> list[dict[str, Any]]:
        ordered = sorted(
            evaluation.rows, key=lambda row: (row.result.domain, row.result.task_index)
        )
        rows = [row.plain(self._transcripts.of(row.first)) for row in ordered]
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        name = f"{evaluation.policy}-step-{evaluation.step:06d}.jsonl"
        private_write(private_folder(self._folder) / name, text.encode())
        return rows
