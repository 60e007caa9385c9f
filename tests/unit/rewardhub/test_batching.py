"""Batches of what arrives while the batch before is computed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest

from rewardhub.rewards.models.batching import BatchQueue


async def test_what_arrives_meanwhile_is_the_next_batch() -> None:
    batches: list[list[int]] = []
    begun = asyncio.Event()
    loop = asyncio.get_running_loop()
    release = threading.Event()

    def double(items: Sequence[int]) -> list[int]:
        batches.append(list(items))
        loop.call_soon_threadsafe(begun.set)
        release.wait(10)
        return [2 * item for item in items]

    queue: BatchQueue[int, int] = BatchQueue(double, 3)
    first = asyncio.create_task(queue.compute(0))
    await begun.wait()
    later = [asyncio.create_task(queue.compute(item)) for item in range(1, 6)]
    await asyncio.sleep(0)
    # One that nobody waits for any more is not computed.
    later[1].cancel()
    await asyncio.sleep(0)
    release.set()
    assert await first == 0
    results = await asyncio.gather(*later, return_exceptions=True)
    assert [result for result in results if isinstance(result, int)] == [2, 6, 8, 10]
    assert batches == [[0], [1, 3], [4, 5]]


async def test_a_failure_is_that_of_its_batch_alone() -> None:
    def refuse(items: Sequence[int]) -> list[int]:
        if 1 in items:
            raise ValueError("out of memory")
        return list(items)

    queue: BatchQueue[int, int] = BatchQueue(refuse, 1)
    results = await asyncio.gather(*map(queue.compute, (0, 1, 2)), return_exceptions=True)
    assert results[0] == 0
    assert results[2] == 2
    assert isinstance(results[1], RuntimeError)
    with pytest.raises(RuntimeError, match=r"^ValueError: out of memory$"):
        await queue.compute(1)
