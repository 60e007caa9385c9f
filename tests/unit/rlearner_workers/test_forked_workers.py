"""Workers that a real process forks: how they end, and what a lost forkserver costs."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
from collections.abc import AsyncIterator
from typing import IO

import msgspec
import pytest
from echo_worker import Echo, EchoSetup
from waits import LONG_S, runs, until

from rlearner_workers import calls
from rlearner_workers.forked_workers import (
    ForkedWorker,
    ForkedWorkers,
    ForkserverKind,
    LoadRefused,
    NoWorker,
)
from rlearner_workers.link import LinkClosed
from rlearner_workers.start import start

Worker = ForkedWorker[calls.CallAnswer]


def launch(theirs: socket.socket, output: IO[bytes]) -> subprocess.Popen[bytes]:
    return start("echo_worker", theirs, output, ("fork",), signal.SIGTERM)


def kind(refusal: str = "", memory_mib: int | None = None) -> ForkserverKind:
    return ForkserverKind("echoes", "an echo", launch, lambda _: EchoSetup(refusal, memory_mib))


class EchoWorkers(ForkedWorkers[calls.CallAnswer]):
    """Workers whose links are closed with them."""

    def __init__(self, kind: ForkserverKind, links_per_worker: int = 1) -> None:
        super().__init__(kind, calls.ANSWERS, links_per_worker)
        self._leases: list[Worker] = []

    async def fork(self) -> Worker:
        worker = await super().fork()
        self._leases.append(worker)
        return worker

    async def close(self) -> None:
        for worker in self._leases:
            worker.link.close()
        await super().close()


@pytest.fixture
async def workers() -> AsyncIterator[EchoWorkers]:
    made = EchoWorkers(kind(memory_mib=100))
    yield made
    pids = [*made.living, made.forkserver_pid]
    await made.close()
    await until(lambda: not any(map(runs, filter(None, pids))))


async def ask(worker: Worker, text: str) -> Echo:
    call = calls.WorkerCall(1, calls.pack_content(Echo(text)))
    async with asyncio.timeout(LONG_S):
        return msgspec.msgpack.decode((await worker.link.call(call)).content, type=Echo)


async def test_each_worker_is_a_process_of_one_parent(
    workers: EchoWorkers,
) -> None:
    first, second = await asyncio.gather(workers.fork(), workers.fork())
    assert {(await ask(first, "a")).pid, (await ask(second, "b")).pid} == workers.living
    await first.close()
    assert workers.living == {second.pid}
    assert not runs(first.pid)
    assert workers.num_died == 0
    assert workers.cpu_s() > 0


@pytest.mark.parametrize(
    ("text", "cause"), [("die", "ended with exit code 7"), ("close", "closed its socket")]
)
async def test_end_of_a_worker_names_its_cause(workers: EchoWorkers, text: str, cause: str) -> None:
    worker = await workers.fork()
    with pytest.raises(LinkClosed):
        await ask(worker, text)
    causes = await asyncio.gather(worker.reap(), worker.reap())
    assert causes == [cause, cause]
    assert (workers.living, workers.num_died) == (set(), 1)


async def test_memory_counts_over_descendants(
    workers: EchoWorkers,
) -> None:
    worker = await workers.fork()
    with pytest.raises(LinkClosed):
        await ask(worker, "grow")
    assert (await worker.reap()).startswith("was killed: it took ")


async def test_lost_forkserver_is_replaced(workers: EchoWorkers) -> None:
    lost = await workers.fork()
    os.kill(workers.forkserver_pid, signal.SIGKILL)
    await until(lambda: not runs(lost.pid))
    with pytest.raises(NoWorker, match="no worker process can be started"):
        await workers.fork()
    assert await lost.reap() == "died"
    assert (await ask(await workers.fork(), "next")).text == "next"
    assert len(workers.living) == 1


async def test_cancelled_fork_leaves_no_worker(
    workers: EchoWorkers,
) -> None:
    forking = asyncio.create_task(workers.fork())
    await until(lambda: workers.num_forking == 1)
    forking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await forking
    await until(lambda: not workers.num_forking and not workers.living)
    assert workers.forkserver_pid


async def test_leases_share_a_worker_until_the_last() -> None:
    shared = EchoWorkers(kind(), 2)
    first, second, third = await asyncio.gather(*(shared.fork() for _ in range(3)))
    assert first.pid == second.pid != third.pid
    answers = await asyncio.gather(ask(first, "nap"), ask(second, "b"))
    assert [answer.pid for answer in answers] == [first.pid] * 2
    await first.close()
    assert (await ask(second, "still there")).pid == second.pid
    await second.close()
    assert not runs(second.pid)
    fourth = await shared.fork()
    assert fourth.pid == third.pid
    await third.close(is_lost=True)
    with pytest.raises(LinkClosed):
        await ask(fourth, "next")
    await fourth.close()
    assert not shared.living
    await shared.close()


async def test_refusal_to_load_is_passed_on() -> None:
    refusing = EchoWorkers(kind("no such file"))
    with pytest.raises(LoadRefused, match=r"^no such file$"):
        await refusing.fork()
    assert not refusing.forkserver_pid
    await refusing.close()
