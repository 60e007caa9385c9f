"""A real child process: its answers, and each way in which it can fail."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator

import psutil
import pytest
from echo_worker import ECHOES, Echo
from waits import LONG_S, runs, until

from rlearner_workers import worker_process
from rlearner_workers.patience import OutOfTime
from rlearner_workers.worker_process import WorkerGone, WorkerProcess


@pytest.fixture
async def worker() -> AsyncIterator[WorkerProcess[Echo]]:
    process = await WorkerProcess.start("echo_worker", sys.stderr.buffer, ECHOES)
    yield process
    await process.close()
    assert not runs(process.pid)


async def test_open_calls_get_their_own_answers(worker: WorkerProcess[Echo]) -> None:
    asking = (worker.call(Echo(str(number)), LONG_S) for number in range(20))
    answers = await asyncio.gather(*asking)
    assert [answer.text for answer in answers] == [str(number) for number in range(20)]
    assert {answer.pid for answer in answers} == {worker.pid}
    assert not worker.is_spent


async def test_silent_process_is_killed(worker: WorkerProcess[Echo]) -> None:
    await worker.call(Echo("first"), LONG_S)
    with pytest.raises(OutOfTime, match="no answer in"):
        await worker.call(Echo("hang"), 0.5)
    assert worker.gone == "was killed: it answered nothing for 0.5 s"
    with pytest.raises(WorkerGone, match="answered nothing"):
        await worker.call(Echo("next"), LONG_S)


async def test_process_that_answers_others_is_not_killed(worker: WorkerProcess[Echo]) -> None:
    await worker.call(Echo("first"), LONG_S)
    naps = [asyncio.create_task(worker.call(Echo("nap"), LONG_S)) for _ in range(3)]
    await until(lambda: worker.num_open == 3)
    with pytest.raises(OutOfTime):
        await worker.call(Echo("hang"), 0.7)
    assert [answer.text for answer in await asyncio.gather(*naps)] == ["nap"] * 3
    assert not worker.gone


async def test_cancelled_call_does_not_answer_the_next(worker: WorkerProcess[Echo]) -> None:
    nap = asyncio.create_task(worker.call(Echo("nap"), LONG_S))
    await until(lambda: worker.num_open == 1)
    nap.cancel()
    assert (await worker.call(Echo("next"), LONG_S)).text == "next"


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("die", "ended with exit code 7"),
        ("abort", "died by SIGABRT"),
        ("close", "closed its socket"),
        ("lie", "sent an answer that cannot be decoded: 4294967295 bytes, the limit is 8388608"),
    ],
)
async def test_end_names_its_cause_for_all_open_calls(
    worker: WorkerProcess[Echo], text: str, cause: str
) -> None:
    asking = [asyncio.create_task(worker.call(Echo(word), LONG_S)) for word in (text, "other")]
    errors = await asyncio.gather(*asking, return_exceptions=True)
    assert [(type(error), str(error)) for error in errors] == [(WorkerGone, cause)] * 2
    assert worker.gone == cause


async def test_memory_counts_over_descendants(worker: WorkerProcess[Echo]) -> None:
    await worker.call(Echo("first"), LONG_S)
    worker.enforce_memory(0)  # nothing is free yet, so nothing is counted
    worker.count_as_free()
    growing = asyncio.create_task(worker.call(Echo("grow"), LONG_S))

    def has_grown() -> bool:
        worker.enforce_memory(100)
        return bool(worker.gone)

    await until(has_grown)
    with pytest.raises(WorkerGone, match=r"^was killed: it took \d+ MiB, the limit is 100$"):
        await growing


async def test_processor_time_outlives_the_process(worker: WorkerProcess[Echo]) -> None:
    with pytest.raises(OutOfTime):
        await worker.call(Echo("spin"), 0.5)
    await worker.close()
    assert worker.cpu_s() > 0.3


async def test_start_that_fails_leaves_no_socket_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("out of processes")

    monkeypatch.setattr(worker_process, "start", refuse)
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="out of processes"):
        await WorkerProcess.start("echo_worker", sys.stderr.buffer, ECHOES)
    assert len(set(os.listdir("/proc/self/fd")) - before) == 0


async def test_cancelled_start_leaves_no_process() -> None:
    before = {child.pid for child in psutil.Process().children()}
    starting = asyncio.create_task(WorkerProcess.start("echo_worker", sys.stderr.buffer, ECHOES))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting

    def started() -> list[int]:
        return [
            child.pid
            for child in psutil.Process().children()
            if child.pid not in before and runs(child.pid)
        ]

    await until(lambda: not started())
