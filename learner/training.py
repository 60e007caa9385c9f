"""The training thread, the only one that touches the model: takes groups, returns completed steps.

Jobs run in submission order, so micro-batches are cut in the order of the log. A step's gradient
accumulates while the rest of its groups are still being generated. If the algorithm needs the whole
step first, the models score the groups that are there, where it needs their scores.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, TypeVar

from broker.contract import wire
from broker.errors import UserError
from broker.runtime.spans import SpanRecorder
from broker.telemetry.operator_profile import ProfilePlan, StepProfiler
from learner.algorithm.assembly import SampleAssembler
from learner.algorithm.batch_adjust import adjust_samples
from learner.algorithm.episodes import num_bytes, without_episodes
from learner.algorithm.packing import MicroBatchCutter
from learner.algorithm.samples import TrainSample
from learner.algorithm.score_stream import ScoreStream
from learner.algorithm.selection import most_varied
from learner.algorithm.token_figures import FigureCollector, StepTokens
from learner.config import AlgorithmSection
from learner.credit.ticket_rules import TicketRules
from learner.reporting.metrics import StepFigures
from learner.turns import DeviceTurns

if TYPE_CHECKING:
    from learner.backends.base import Backend

log = logging.getLogger(__name__)
T = TypeVar("T")

RESTART_ADVICE: Final = (
    "start this one again, with train.streaming=never until its next checkpoint if that repeats"
)
# Groups that wait for the thread: enough to keep it busy.
BACKLOG_BYTES: Final = 8 << 20


@dataclass(frozen=True)
class TrainingResult:
    """Result of a training step."""

    values: dict[str, float]  # metrics of the step, by their published names
    num_tokens: int  # sampled ones
    num_samples: int  # training sequences
    busy_s: float  # that the thread spent on it
    finish_s: float  # of these, after the last group
    # of the groups that were trained on; the others were not selected
    tickets: tuple[int, ...] = ()
    # entropy and importance ratio of their tokens; None: not recorded
    tokens: StepTokens | None = None
    is_skipped: bool = False  # no gradient was finite, so the policy is as before
    problem: str = ""  # the tensor by which a gradient was not finite, if one was and it is known


class TrainingThread:
    """Owner of the training thread; ``open`` builds the backend in the thread that uses it.

    Args:
        build: makes the backend.
        estimator: estimates the advantages.
        stream: False waits for all groups of a step even if the algorithm could begin without them.
        turns: on devices that the model shares with other processes; None: they are always the
            model's. A step then takes one turn, so ``stream`` must be False.
        record_tokens: record entropy and importance ratio of each token, if the backend can.
        profile: the steps whose operators are recorded; None: none are.
    """

    def __init__(
        self,
        build: Callable[[], Backend],
        estimator: Any,
        algorithm: AlgorithmSection,
        *,
        stream: bool = True,
        turns: DeviceTurns | None = None,
        record_tokens: bool = False,
        profile: ProfilePlan | None = None,
    ) -> None:
        if stream and turns is not None:
            raise ValueError(
                "a model that shares its devices cannot train a step before its groups are there"
            )
        self._turns = turns
        # Held until the job of a new turn is submitted, so that the turn cannot end before it.
        self._turn_lock = asyncio.Lock()
        self._algorithm = algorithm
        self._build = build
        self._assembly = SampleAssembler(estimator, algorithm, stream=stream)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="training")
        self._groups: list[wire.Group] = []  # of the step, in the order of the log
        self._num_streamed = 0  # of these, added to the gradient as they arrived
        self._num_freed = 0  # of these, of which only the head is left
        self._step = StepFigures()
        self._figures = FigureCollector()
        self._record_tokens = record_tokens
        # Bytes of the groups that wait for the thread.
        self._backlog = 0
        self._shrunk = asyncio.Event()
        self._busy_s = 0.0
        self._abandoned = threading.Event()
        self._stopped = asyncio.Event()
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.spans = SpanRecorder()
        self._profiler = StepProfiler(profile)

    async def open(self) -> Backend:
        """Build the backend; only jobs may touch it.

        Raises:
            ConfigError: if the backend refuses the configuration.
        """
        self.backend = await self.call(self._build)
        if self._turns is not None:
            self._turns.loaded(self.backend)
        self._cutter: MicroBatchCutter[TrainSample] = self.backend.cutter()
        self._scores = ScoreStream(
            self.backend.cutter(), lambda samples: self.backend.score(samples)
        )
        if self._record_tokens and not await self.call(self.backend.record_tokens):
            log.info(
                "entropy and importance ratio per token are not recorded: only one rank can, and "
                "not megatron's"
            )
            self._record_tokens = False
        return self.backend

    async def call(self, job: Callable[[], T]) -> T:
        """Run a job in the thread after those already submitted, with the model on its device."""
        async with self._turn_lock:
            if self._turns is not None:
                await self._turns.begin(self._run)
            future = self._submit(job)
        return await future

    @property
    def on_device(self) -> bool:
        """Whether other processes wait for this one to leave a shared device."""
        return self._turns is not None and self._turns.on_device

    async def leave(self) -> None:
        """Let other processes use a shared device until the next job."""
        if self._turns is not None:
            async with self._turn_lock:
                await self._turns.end(self._run)

    def turn_values(self) -> dict[str, float]:
        """Return the metrics of the turns on a shared device since the last call."""
        return self._turns.values() if self._turns is not None else {}

    def _submit(self, job: Callable[[], T]) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._thread, job)

    async def _run(self, job: Callable[[], None]) -> None:
        await self._submit(job)

    def add(
        self, group: wire.Group, rules: TicketRules | None = None, *, is_settled: bool = False
    ) -> None:
        """Add a group to the current step, without waiting; ``failed`` and ``finish`` raise errors.

        Args:
            rules: those in force in the log at this place; None: those of the configuration.
            is_settled: no other rules follow within the step, so a group may be freed once it is
                trained on.
        """
        size = num_bytes(group)
        self._backlog += size
        future = self._submit(partial(self._add, group, rules, is_settled=is_settled))
        future.add_done_callback(partial(self._watch, size))

    async def has_room(self) -> None:
        """Wait until the thread has worked off enough of the groups to need more."""
        while self._backlog > BACKLOG_BYTES:
            self._shrunk.clear()
            await self._shrunk.wait()

    async def finish(self, version: int, rules: TicketRules | None = None) -> TrainingResult | None:
        """Train the rest and take the optimizer step; return None if the step was abandoned.

        Args:
            version: the policy version that is being trained.
            rules: those in force in the log where the step is full; None: those of the
                configuration.
        """
        if self._turns is not None:
            async with self._turn_lock:
                if not await self._turns.begin(self._run, self._stopped):
                    return None
        result = await self.call(lambda: self._finish(version, rules))
        if self.failed.done():
            self.failed.result()
        return result

    def abandon(self) -> None:
        """Stop training after the current micro-batch, without taking the current step."""
        self._abandoned.set()
        self._stopped.set()

    async def undo(self) -> None:
        """Discard what an abandoned step has accumulated; the backend is between steps again."""
        await self.call(self._discard)

    def _discard(self) -> None:
        self._begin_step()
        self._cutter.flush()
        self._scores.reset()
        self.backend.discard()

    def close(self) -> None:
        """Wait for the thread and for everything that the backend started to end."""
        self.abandon()
        self._thread.submit(self._profiler.close).result()
        if hasattr(self, "backend"):
            self._thread.submit(self.backend.close).result()
        self._thread.shutdown()

    def _begin_step(self) -> None:
        self._groups = []
        self._num_streamed = 0
        self._num_freed = 0
        self._step = StepFigures()
        self._figures.take()

    def _watch(self, num_bytes: int, future: asyncio.Future[None]) -> None:
        self._backlog -= num_bytes
        self._shrunk.set()
        if (
            not future.cancelled()
            and (error := future.exception()) is not None
            and not self.failed.done()
        ):
            # A step that lacks a group must not be taken.
            self.abandon()
            self.failed.set_exception(error)

    def _keep_fraction(self, rules: TicketRules | None) -> float:
        """Return the share of groups that are trained on; pass the rules to the backend."""
        if rules is not None:
            self.backend.follow_rules(steps=rules.steps, seed=rules.seed)
            return rules.keep_fraction
        return self._algorithm.keep_fraction if self._algorithm.pg_variant == "starpo_s" else 1.0

    def _add(self, group: wire.Group, rules: TicketRules | None, *, is_settled: bool) -> None:
        if self._abandoned.is_set():
            return
        started_at = time.monotonic()
        can_stream = self._num_streamed == len(self._groups) and self._keep_fraction(rules) == 1.0
        self._step.add_group(group)
        self._groups.append(group)
        if not can_stream or (self._assembly.needs_batch and not self._assembly.scores_stream):
            return
        self._num_streamed += 1
        with self._work():
            if self._assembly.needs_batch:
                self._scores.add(self._assembly.unscored(group))
            else:
                self._train(group)
                if is_settled:
                    self._groups[-1] = without_episodes(group)
                    self._num_freed += 1
        self._busy_s += time.monotonic() - started_at

    @contextmanager
    def _work(self) -> Iterator[None]:
        """Measure work on the current step."""
        # A backend of the user's need not count steps.
        step = self.backend.version + 1 if self._profiler.is_active else 0
        with self.spans.work("train"), self._profiler.record(step):
            yield

    def _train(self, group: wire.Group) -> None:
        samples = self._assembly.stream(group)
        if self._record_tokens:
            self._figures.expect(group.ticket, samples)
        for sample in samples:
            if (micro_batch := self._cutter.add(sample)) is not None:
                self._forward_backward(micro_batch)
                if self._abandoned.is_set():
                    return

    def _forward_backward(self, samples: list[TrainSample]) -> None:
        self.backend.forward_backward(samples)
        if self._record_tokens:
            self._figures.collect(self.backend.take_recorded())

    def _train_rest(self, version: int, groups: Sequence[wire.Group]) -> dict[str, float] | None:
        """Complete a step whose gradient accumulated early; return None if it is abandoned.

        Args:
            groups: those to train on. If they are not those that were added to the gradient, it
                begins again.

        Raises:
            UserError: if groups of which it must begin again were freed.
        """
        streamed = self._groups[: self._num_streamed]
        if [group.ticket for group in groups] != [group.ticket for group in streamed]:
            if self._num_freed:
                raise UserError(
                    f"step {version + 1}: another learner has changed its rules; {RESTART_ADVICE}"
                )
            self._cutter.flush()
            self._figures.take()
            self.backend.discard()
            for group in groups:
                self._train(group)
        last_micro_batch = self._cutter.flush()
        if last_micro_batch and not self._abandoned.is_set():
            self._forward_backward(last_micro_batch)
        return None if self._abandoned.is_set() else self.backend.step()

    def _train_batch(self, version: int, groups: Sequence[wire.Group]) -> dict[str, float] | None:
        """Train a step that needs all its groups; once begun, its updates cannot be undone."""
        if self._abandoned.is_set():
            return None
        # The rules changed within the step.
        if self._num_streamed not in (0, len(self._groups)):
            self._scores.reset()
            self.backend.discard()
        samples = self._assembly.batch(groups, self._scores.finish, self.backend.kl_coef)
        if self._record_tokens:
            remaining_samples = iter(samples)
            for group in groups:
                self._figures.expect(
                    group.ticket, list(islice(remaining_samples, len(group.trajectories)))
                )
        if (mode := self._algorithm.batch_adjust) is not None:
            trained_samples = [sample for sample in samples if sample.num_tokens]
            samples = adjust_samples(
                trained_samples, self._algorithm.num_minibatches, mode, version
            )
        if self._abandoned.is_set():
            return None
        values = self.backend.update(samples)
        if self._record_tokens:
            self._figures.collect(self.backend.take_recorded())
        return values

    def _finish(self, version: int, rules: TicketRules | None) -> TrainingResult | None:
        started_at = time.monotonic()
        selected = most_varied(self._groups, self._keep_fraction(rules))
        with self._work():
            needs_batch = self._assembly.needs_batch
            train = self._train_batch if needs_batch else self._train_rest
            values = train(version, selected)
        if values is None:
            return None
        self._profiler.end(version + 1)
        step = self._step
        tokens = self._figures.take() if self._record_tokens else None
        self._begin_step()
        is_finite = all(map(math.isfinite, values.values()))
        problem = "" if is_finite else self.backend.take_problem()
        values = step.values(version) | values
        finish_s = time.monotonic() - started_at
        busy_s = self._busy_s + finish_s
        self._busy_s = 0.0
        tickets = tuple(group.ticket for group in selected)
        num_skipped = values.get("actor/skipped", 0.0) * self._algorithm.num_epochs
        return TrainingResult(
            values,
            num_tokens=step.num_tokens,
            num_samples=step.num_samples,
            busy_s=busy_s,
            finish_s=finish_s,
            tickets=tickets,
            tokens=tokens,
            is_skipped=num_skipped > 0 and num_skipped >= values.get("actor/num_updates", 1.0),
            problem=problem,
        )
