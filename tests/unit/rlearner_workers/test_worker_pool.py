"""A pool of real processes: which of them are kept, and which are replaced."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator

import pytest
from echo_worker import ECHOES, Echo
from waits import LONG_S, runs, until

from broker.system.process_tree import resident_mib
from rlearner_workers.output import WorkerOutput
from rlearner_workers.patience import OutOfTime
from rlearner_workers.worker_pool import ProcessPool
from rlearner_workers.worker_process import WorkerGone, WorkerProcess

MEMORY_MIB = 100


class EchoPool(ProcessPool[Echo]):
    """A pool of two, and what its starts do."""

    def __init__(self, calls_at_once: int = 1) -> None:
        super().__init__(2, calls_at_once=calls_at_once, memory_mib=MEMORY_MIB)
        self.failure: BaseException | None = None
        self.num_started = 0
        self.output = WorkerOutput("an echo")
        self.losses: list[str] = []

    async def open_worker(self, index: int) -> WorkerProcess[Echo]:
        self.num_started += 1
        return await WorkerProcess.start("echo_worker", self.output.file, ECHOES)

    async def prepare(self, worker: WorkerProcess[Echo], limit_s: float) -> None:
        if self.failure is not None:
            raise self.failure
        await worker.call(Echo("prepare"), limit_s)

    def report_loss(self, cause: str) -> None:
        self.losses.append(cause)

    async def ask(self, text: str, limit_s: float = LONG_S) -> int:
        return (await self.call(Echo(text), limit_s, LONG_S)).pid


@pytest.fixture
async def pool() -> AsyncIterator[EchoPool]:
    made = EchoPool()
    yield made
    pids = [worker.pid for worker in made.living]
    await made.close()
    made.output.close()
    assert not [pid for pid in pids if runs(pid)]


async def test_quiet_times_use_one_worker(pool: EchoPool) -> None:
    assert len({await pool.ask(str(number)) for number in range(4)}) == 1
    busy = [asyncio.create_task(pool.ask("nap")) for _ in range(4)]
    pids = await asyncio.gather(*busy)
    assert len(set(pids)) == pool.num_started == 2
    assert (pool.num_free, pool.num_busy, pool.num_killed) == (2, 0, 0)


@pytest.mark.parametrize(
    ("text", "error"), [("hang", OutOfTime), ("die", WorkerGone), ("grow", WorkerGone)]
)
async def test_lost_worker_is_replaced(pool: EchoPool, text: str, error: type[Exception]) -> None:
    pid = await pool.ask("first")
    with pytest.raises(error):
        await pool.ask(text, LONG_S if error is WorkerGone else 0.5)
    assert (pool.num_killed, len(pool.losses)) == (1, 1)
    assert await pool.ask("next") != pid
    assert not runs(pid)


async def test_worker_that_died_idle_costs_no_call(pool: EchoPool) -> None:
    pid = await pool.ask("first")
    os.kill(pid, signal.SIGKILL)
    await until(lambda: [worker for worker in pool.living if worker.gone])
    assert await pool.ask("next") != pid
    assert pool.losses == ["died by SIGKILL"]


async def test_calls_of_a_lost_worker_are_one_loss(pool: EchoPool) -> None:
    shared = EchoPool(calls_at_once=8)
    asking = [asyncio.create_task(shared.ask(text)) for text in ("die", *"abc")]
    errors = await asyncio.gather(*asking, return_exceptions=True)
    assert {str(error) for error in errors if isinstance(error, WorkerGone)} == {
        "ended with exit code 7"
    }
    assert shared.num_killed == 1
    await shared.close()


async def test_spent_and_retired_workers_are_replaced(pool: EchoPool) -> None:
    first = await pool.ask("spent")
    second = await pool.ask("next")
    pool.retire_workers()
    third = await pool.ask("next")
    assert len({first, second, third}) == 3
    assert await pool.ask("next") == third
    assert pool.num_killed == 0
    assert pool.cpu_s() > 0


async def test_cancelled_call_ends_its_worker(pool: EchoPool) -> None:
    pid = await pool.ask("first")
    hanging = asyncio.create_task(pool.ask("hang"))
    while not pool.num_busy:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    hanging.cancel()
    with pytest.raises(asyncio.CancelledError):
        await hanging
    assert not runs(pid)
    assert pool.num_free == 2


async def test_failed_start_keeps_the_place(pool: EchoPool) -> None:
    pool.failure = RuntimeError("not loadable")
    with pytest.raises(RuntimeError, match="not loadable"):
        await pool.ask("first")
    assert [str(error) for error in await pool.start_workers(LONG_S)] == ["not loadable"] * 2
    assert not pool.living
    pool.failure = None
    assert await pool.start_workers(LONG_S) == []
    assert len(pool.living) == pool.num_free == 2


async def test_gigabyte_of_output_is_dropped(
    pool: EchoPool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    before_mib = resident_mib([os.getpid()])
    await pool.ask("print")
    lines = [message for message in caplog.messages if "prints" in message]
    assert 1 <= len(lines) < 1000
    assert sum(map(len, lines)) < 128 << 10
    assert lines[-1] == "an echo prints too much: dropped for up to 60 s"
    assert resident_mib([os.getpid()]) - before_mib < 50
