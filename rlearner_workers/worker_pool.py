"""A fixed number of places for workers, which are replaced when one hangs, dies or is spent."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

import msgspec

from rlearner_workers.patience import OutOfTime
from rlearner_workers.worker_process import WorkerGone, WorkerProcess

WATCH_EVERY_S: Final = 0.5

Answer = TypeVar("Answer")


@dataclass(eq=False)
class _Place(Generic[Answer]):
    index: int
    worker: WorkerProcess[Answer] | None = None
    num_calls: int = 0
    starting: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def burden(self) -> tuple[int, bool]:
        """Its calls; of two places with as many, a worker that runs goes first."""
        return self.num_calls, self.worker is None


class ProcessPool(ABC, Generic[Answer]):
    """The workers. A place without a worker gets one with its next call.

    Args:
        num_workers: number of places.
        calls_at_once: of one worker.
        memory_mib: of a worker and its descendants, beyond what they take once prepared; None: no
            limit.

    Attributes:
        living: workers that are not reaped.
        num_killed: workers that were lost to a timeout or a crash.
        num_busy: calls that a worker works on, or is started for.
        num_free: further calls that would not wait; negative: as many wait.
    """

    def __init__(
        self, num_workers: int, *, calls_at_once: int = 1, memory_mib: int | None = None
    ) -> None:
        self._calls_at_once = calls_at_once
        self._memory_mib = memory_mib
        self._places: list[_Place[Answer]] = [_Place(index) for index in range(num_workers)]
        self.num_free = num_workers * calls_at_once
        self._room = asyncio.Semaphore(self.num_free)
        self.living: set[WorkerProcess[Answer]] = set()
        self._watching: asyncio.Task[None] | None = None
        self._reaped_cpu_s = 0.0
        self.num_killed = self.num_busy = 0

    @abstractmethod
    async def open_worker(self, index: int) -> WorkerProcess[Answer]:
        """Start the process of a place. What it raises, the call or the start raises."""

    @abstractmethod
    async def prepare(self, worker: WorkerProcess[Answer], limit_s: float) -> None:
        """Make a process ready for calls within some seconds on its own clock; raises likewise."""

    def report_loss(self, cause: str) -> None:
        """Called for each worker that was lost."""

    def retire_workers(self) -> None:
        """Replace each worker before its next call."""
        for worker in self.living:
            worker.is_spent = True

    async def start_workers(self, limit_s: float) -> list[BaseException]:
        """Start the workers of all places; return the errors of those that did not start.

        Args:
            limit_s: for one to be ready, on its own clock.
        """
        starting = (self._take_worker(place, limit_s) for place in self._places)
        results = await asyncio.gather(*starting, return_exceptions=True)
        return [result for result in results if isinstance(result, BaseException)]

    async def call(self, request: msgspec.Struct, limit_s: float, start_s: float) -> Answer:
        """Return the answer of the worker with the fewest calls.

        Args:
            limit_s: for the answer, on the worker's own clock.
            start_s: for a worker to be ready, if one has to start.

        Raises:
            OutOfTime: if no answer comes in time.
            WorkerGone: if the worker dies.
        """
        self.num_free -= 1
        try:
            async with self._room:
                place = min(self._places, key=lambda place: place.burden)
                place.num_calls += 1
                self.num_busy += 1
                try:
                    return await self._call_place(place, request, limit_s, start_s)
                finally:
                    place.num_calls -= 1
                    self.num_busy -= 1
        finally:
            self.num_free += 1

    async def close(self) -> None:
        """Kill all workers."""
        if self._watching is not None:
            self._watching.cancel()
        await asyncio.gather(*(self._reap(worker) for worker in list(self.living)))

    def cpu_s(self) -> float:
        """Return the processor seconds of all workers so far."""
        return self._reaped_cpu_s + sum(worker.cpu_s() for worker in self.living)

    async def _call_place(
        self, place: _Place[Answer], request: msgspec.Struct, limit_s: float, start_s: float
    ) -> Answer:
        worker = await self._take_worker(place, start_s)
        try:
            return await worker.call(request, limit_s)
        except (OutOfTime, WorkerGone):
            self._count_loss(worker)
            raise
        except asyncio.CancelledError:
            if self._calls_at_once == 1:
                worker.kill("was cancelled")  # it still computes
            raise
        finally:
            if _is_over(worker):
                await self._reap(worker)

    async def _take_worker(self, place: _Place[Answer], start_s: float) -> WorkerProcess[Answer]:
        async with place.starting:
            worker = place.worker
            if worker is not None and not worker.gone and not worker.is_spent:
                return worker
            place.worker = None
            # One that still has calls is reaped after the last of them.
            if worker is not None and _is_over(worker):
                self._count_loss(worker)
                await self._reap(worker)
            if self._watching is None and self._memory_mib is not None:
                self._watching = asyncio.create_task(self._watch(self._memory_mib))
            worker = await self.open_worker(place.index)
            self.living.add(worker)
            try:
                await self.prepare(worker, start_s)
            except BaseException:
                await self._reap(worker)
                raise
            worker.count_as_free()
            place.worker = worker
            return worker

    def _count_loss(self, worker: WorkerProcess[Answer]) -> None:
        # Once: it is reaped then.
        if worker.gone and worker in self.living:
            self.living.discard(worker)
            self._reaped_cpu_s += worker.cpu_s()
            self.num_killed += 1
            self.report_loss(worker.gone)

    async def _watch(self, memory_mib: int) -> None:
        while True:
            await asyncio.sleep(WATCH_EVERY_S)
            for worker in list(self.living):
                worker.enforce_memory(memory_mib)

    async def _reap(self, worker: WorkerProcess[Answer]) -> None:
        if worker in self.living:
            self.living.discard(worker)
            self._reaped_cpu_s += worker.cpu_s()
        await worker.close()


def _is_over(worker: WorkerProcess[Answer]) -> bool:
    """Return whether a worker takes no more calls, and works on none."""
    return bool(worker.gone) or (worker.is_spent and not worker.num_open)
