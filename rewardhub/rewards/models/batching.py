"""Collects what arrives while a model computes into the next batch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

Item = TypeVar("Item")
Output = TypeVar("Output")


class BatchQueue(Generic[Item, Output]):
    """Computes items in batches, one batch at a time, in a thread.

    Args:
        compute: returns the outputs of some items, in their order.
        batch_size: most items of a batch.
    """

    def __init__(
        self, compute: Callable[[Sequence[Item]], Sequence[Output]], batch_size: int
    ) -> None:
        self._compute = compute
        self._batch_size = batch_size
        self._waiting: list[tuple[Item, asyncio.Future[Output]]] = []
        self._working: asyncio.Task[None] | None = None

    async def compute(self, item: Item) -> Output:
        """Return the output of an item.

        Raises:
            RuntimeError: if computing its batch failed.
        """
        future: asyncio.Future[Output] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, future))
        if self._working is None:
            self._working = asyncio.create_task(self._work())
        return await future

    async def _work(self) -> None:
        """Compute batches until nothing waits."""
        try:
            while self._waiting:
                batch = [
                    entry for entry in self._waiting[: self._batch_size] if not entry[1].done()
                ]
                del self._waiting[: self._batch_size]
                if batch:
                    await self._compute_batch(batch)
        finally:
            self._working = None

    async def _compute_batch(self, batch: Sequence[tuple[Item, asyncio.Future[Output]]]) -> None:
        try:
            outputs = await asyncio.to_thread(self._compute, [item for item, _ in batch])
        except Exception as error:  # noqa: BLE001 - an error of torch fails the waiting items
            failure = RuntimeError(f"{type(error).__name__}: {error}")
            for _, future in batch:
                if not future.done():
                    future.set_exception(failure)
            return
        for (_, future), output in zip(batch, outputs, strict=True):
            if not future.done():
                future.set_result(output)
