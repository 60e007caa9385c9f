"""Environments in real worker processes: each fault costs one episode, names itself, and leaves
nothing behind.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from envhub_kit import Scripted, domain, write_tokenizer
from source_lines import line_of
from waits import LONG_S, runs

from envhub.domain import Domain
from envhub.episodes.runners import EpisodeLimits, EpisodeRunners
from envhub.task import EpisodeFailed, EpisodeResult, EpisodeTask
from envhub.workers.calls import EnvironmentCalls
from envhub.workers.worker_pool import RemoteEnvironment, WorkerPools
from rlearner_text.tokenizer import Tokenizer

STEP_S = 3  # what is healthy must do with it on a machine that has much else to do
AT_ONCE = 6
MEMORY_MIB = 200


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture
async def crew(tokenizer: Tokenizer) -> AsyncIterator[EpisodeRunners]:
    made = EpisodeRunners(
        tokenizer,
        Scripted(tokenizer, lambda _: "R"),
        EnvironmentCalls(STEP_S),
        EpisodeLimits(600.0, 10.0),
        WorkerPools(MEMORY_MIB),
        max_workers=4,
    )
    yield made
    pids = [pid for pool in made.worker_pools._pools.values() for pid in pool.workers.living]
    await made.close()
    await gone(*pids)


async def gone(*pids: int, within_s: float = 30.0) -> None:
    """Until none of the processes runs."""
    async with asyncio.timeout(within_s):
        while any(map(runs, pids)):  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def bad(*does: str, name: str = "d", cls: str = "Bad", **args: Any) -> Domain:
    return domain(
        f"envhub_bad:{cls}", name, max_turns=5, isolation="process", env_args={"does": does, **args}
    )


async def play(crew: EpisodeRunners, chosen: Domain, index: int = 0) -> EpisodeResult:
    return await crew.play(
        EpisodeTask("c", chosen, task_index=index, split="train", seed=7, episode=0), lambda _: None
    )


async def fails(crew: EpisodeRunners, chosen: Domain, index: int = 0) -> str:
    with pytest.raises(EpisodeFailed) as caught:
        await play(crew, chosen, index)
    assert caught.value.kind == "env"
    return caught.value.detail


async def test_an_environment_plays_the_same_wherever_it_runs(crew: EpisodeRunners) -> None:
    def lake(isolation: str) -> Domain:
        return domain(
            "frozenlake",
            isolation,
            max_turns=9,
            isolation=isolation,
            env_args={"is_slippery": True},
        )

    played = [
        await play(crew, lake(isolation), index=3) for isolation in ("none", "thread", "process")
    ]
    assert played[0].trajectory == played[1].trajectory == played[2].trajectory
    assert len(played[0].trajectory.turns) >= 2


@pytest.mark.parametrize("cls", ["Bad", "AsyncBad"])
async def test_a_worker_serves_one_episode_after_another(crew: EpisodeRunners, cls: str) -> None:
    chosen = bad(cls=cls)
    first, second = await play(crew, chosen, 1), await play(crew, chosen, 2)
    assert (first.trajectory.reward, first.trajectory.success, first.prompt, second.prompt) == (
        1.0,
        True,
        "task 1",
        "task 2",
    )
    # the same process, and not this one
    assert first.reference == second.reference != str(os.getpid())
    assert crew.worker_pools.living == 1
    both = await asyncio.gather(play(crew, chosen), play(crew, chosen))
    assert both[0].reference != both[1].reference  # a process for each that runs
    assert crew.worker_pools.cpu_s() > 0


LATE = f"did not return within {STEP_S} s"
FAULTS = {
    "sleeps": f"step {LATE}",
    "spins in reset": f"reset {LATE}",
    "ignores_signals in reset": f"reset {LATE}",
    "raises": f"step raised ValueError: broken in two lines (envhub_bad.py:{line_of('envhub_bad.py', 'raise ValueError(')} in _raises)",
    "exits in reset": f"reset raised SystemExit: 3 (envhub_bad.py:{line_of('envhub_bad.py', 'sys.exit(3)')} in _exits)",
    "leaves": "step: the worker process ended with exit code 7",
    "aborts in reset": "reset: the worker process died by SIGABRT",
    "reads_nowhere": "step: the worker process died by SIGSEGV",
    "recurses": "step raised RecursionError: maximum recursion depth exceeded",
    "closes_everything": "step: the worker process closed its socket",
    "answers_itself": "step: the worker process sent an invalid answer: 2147483647 bytes, the limit is 8388608",
    "returns_none": "step returned str, not a StepResult",
    "returns_none in reset": "reset returned str, not an Observation",
    "returns_nan": "step returned reward nan; it must be finite",
    "returns_infinite_metric": "step returned metric 'speed' inf; it must be finite",
    "returns_text_reward": "step returned reward str '1.0', not a number",
    "returns_text_done": "step returned done str 'False', not True or False",
    "returns_number_observation": "step returned an Observation whose text is int 17, not a text",
    "returns_surrogates": "step returned an Observation whose text is not valid Unicode: half of a surrogate pair at 1",
    "returns_ten_megabytes": "step returned an Observation whose text has 10000000 bytes, the limit is 1048576",
    "returns_ten_megabytes_of_anchor": "step returned an Observation whose anchor has 10000000 bytes, the limit is "
    "8388608",
    "returns_a_thousand_metrics": "step returned 1000 metrics, the limit is 256",
}


async def test_each_fault_names_itself_and_costs_its_own_episode(
    crew: EpisodeRunners, tmp_path: Path
) -> None:
    chosen = bad(*FAULTS, folder=str(tmp_path))
    await play(crew, chosen, len(FAULTS))
    good = [asyncio.create_task(play(crew, chosen, len(FAULTS))) for _ in range(4)]
    turn = asyncio.Semaphore(AT_ONCE)

    async def fails_in_turn(index: int) -> str:
        async with turn:
            return await fails(crew, chosen, index)

    details = await asyncio.gather(*(fails_in_turn(index) for index in range(len(FAULTS))))
    for (fault, expected), detail in zip(FAULTS.items(), details, strict=True):
        assert detail.startswith(expected), fault
    assert all(one.trajectory.success for one in await asyncio.gather(*good))
    traces = [trace.suffix for trace in tmp_path.iterdir()]  # noqa: ASYNC240 - a test
    assert len(traces) == len(FAULTS)
    await gone(*(int(pid[1:]) for pid in traces))  # whatever signals they ignore


@pytest.mark.parametrize(
    ("fault", "detail"),
    [
        ("holds_the_lock", f"constructor {LATE}"),
        ("aborts", "constructor: the worker process died by SIGABRT"),
    ],
)
async def test_a_constructor_is_no_better(crew: EpisodeRunners, fault: str, detail: str) -> None:
    assert await fails(crew, bad(constructor=fault)) == detail


async def test_numbers_of_numpy_become_plain_ones(crew: EpisodeRunners) -> None:
    trajectory = (await play(crew, bad("returns_numpy"))).trajectory
    assert (trajectory.reward, trajectory.success, trajectory.metrics["at"], trajectory.end) == (
        1.0,
        True,
        2.0,
        "terminated",
    )
    assert [type(turn.reward) for turn in trajectory.turns] == [float, float]


async def test_what_it_started_dies_with_it(crew: EpisodeRunners, tmp_path: Path) -> None:
    await fails(crew, bad("waits_for_its_child", folder=str(tmp_path)))
    await gone(int((tmp_path / "child").read_text()))  # although it leads a session of its own


async def test_memory_is_limited_in_it_and_counted_over_all_that_it_started(
    crew: EpisodeRunners,
) -> None:
    crew.calls = EnvironmentCalls(20.0)
    chosen = bad("leaks", "leaks_through_children")
    alone, with_children = await asyncio.gather(fails(crew, chosen, 0), fails(crew, chosen, 1))
    assert alone.startswith("step raised MemoryError")
    assert with_children.startswith("step: the worker process was killed: it took ")
    assert with_children.endswith(f"MiB, the limit is {MEMORY_MIB}")
    assert crew.worker_pools.num_died == 1


async def test_a_worker_that_has_used_much_is_not_used_again(crew: EpisodeRunners) -> None:
    chosen = bad("keeps_some")
    first = await play(crew, chosen)
    assert not crew.idle.get("d")
    assert (await play(crew, chosen, 1)).reference != first.reference
    assert len(crew.idle["d"]) == 1


async def test_what_it_prints_stands_in_the_log(
    crew: EpisodeRunners, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    await play(crew, bad("prints_to_both"))
    async with asyncio.timeout(LONG_S):
        while not {"domain d prints: said", "domain d prints: complained"} <= set(caplog.messages):  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_a_dead_worker_is_replaced_soon(crew: EpisodeRunners) -> None:
    chosen = bad()
    pid = int((await play(crew, chosen)).reference)
    for number in (signal.SIGKILL, signal.SIGSTOP):
        os.kill(pid, number)
        await fails(crew, chosen)
        began = time.monotonic()
        played = await play(crew, chosen)
        assert time.monotonic() - began < 20.0  # 0.1 s on a machine that does nothing else
        assert int(played.reference) != pid
        await gone(pid)
        pid = int(played.reference)


async def test_a_killed_nursery_costs_its_episodes_and_begins_anew(crew: EpisodeRunners) -> None:
    chosen = bad()
    await play(crew, chosen)
    (environment,) = crew.idle["d"]
    assert isinstance(environment, RemoteEnvironment)
    os.kill(crew.worker_pools._pools["d"].workers.forkserver_pid, signal.SIGKILL)
    await gone(environment.pid)  # with its parent
    assert "the worker process died" in await fails(crew, chosen)
    assert (await play(crew, chosen)).trajectory.success
    assert crew.worker_pools.living == 1


async def test_episodes_that_are_given_up_leave_no_process(crew: EpisodeRunners) -> None:
    chosen = bad("sleeps")
    started = [asyncio.create_task(play(crew, chosen)) for _ in range(8)]
    await asyncio.sleep(0.3)
    for task in started:
        task.cancel()
    await asyncio.gather(*started, return_exceptions=True)
    async with asyncio.timeout(LONG_S):
        while crew.worker_pools.living:  # noqa: ASYNC110 - a set has no event
            await asyncio.sleep(0.02)


async def test_idle_environments_of_one_domain_make_way_for_another(crew: EpisodeRunners) -> None:
    def named(name: str) -> Domain:
        return domain("envhub_bad:Bad", name, max_turns=5, isolation="process")

    await asyncio.gather(*(play(crew, named("one")) for _ in range(4)))
    assert crew.worker_pools.living == 4
    await asyncio.gather(*(play(crew, named("two")) for _ in range(4)))
    async with asyncio.timeout(LONG_S):
        while crew.worker_pools.living > 4:  # noqa: ASYNC110 - a set has no event
            await asyncio.sleep(0.02)
    assert len(crew.idle["two"]) == 4


async def test_environments_share_worker_processes(tokenizer: Tokenizer) -> None:
    shared = EpisodeRunners(
        tokenizer,
        Scripted(tokenizer, lambda _: "R"),
        EnvironmentCalls(STEP_S),
        EpisodeLimits(600.0, 10.0),
        WorkerPools(MEMORY_MIB, num_envs=4),
    )
    chosen = bad("", "raises", "sleeps")
    good = await asyncio.gather(*(play(shared, chosen) for _ in range(4)))
    assert len({played.reference for played in good}) == shared.worker_pools.living == 1
    # What raises ends its own episode; what hangs ends its process.
    assert "ValueError" in await fails(shared, chosen, 1)
    assert (await play(shared, chosen)).reference == good[0].reference
    assert LATE in await fails(shared, chosen, 2)
    await gone(int(good[0].reference))
    await shared.close()


async def test_idle_worker_processes_are_stopped(crew: EpisodeRunners) -> None:
    crew.worker_idle_s = 10.0
    pid = int((await play(crew, bad())).reference)
    crew.stop_idle_workers(time.monotonic() + 9.0)
    assert len(crew.idle["d"]) == 1
    crew.stop_idle_workers(time.monotonic() + 11.0)
    assert not crew.idle["d"]
    await gone(pid)
    assert (await play(crew, bad())).trajectory.success


async def test_a_module_that_starts_threads_is_imported_by_each_worker(
    crew: EpisodeRunners, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "threaded.py"
    file.write_text(
        "import threading, time\nfrom envhub_bad import Bad\n"
        "threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\nclass Threaded(Bad): pass\n"
    )
    assert (
        await play(crew, domain(f"{file}:Threaded", max_turns=5, isolation="process"))
    ).trajectory.success
    assert "starts threads when it is imported, so each worker imports it for itself" in caplog.text


def test_workers_do_not_outlive_a_hub_that_is_killed(tmp_path: Path) -> None:
    code = (
        "import asyncio, sys\nfrom broker.settings.config import DomainSection\nfrom envhub.domain import load_domain\n"
        "from envhub.workers.worker_pool import WorkerPools\n"
        "async def main():\n"
        f"    args = dict(does=['waits_for_its_child in reset'], folder={str(tmp_path)!r})\n"
        "    section = DomainSection(env='tests/kit/envhub_bad.py:Bad', env_args=args)\n"
        "    one = await WorkerPools(None).environment(load_domain('d', section))\n"
        "    await one.constructor()\n"
        "    asyncio.create_task(one.reset(0, 'train', 0))\n"
        "    await asyncio.sleep(1)\n"
        "    print(one.pid, one.worker.workers.forkserver_pid, flush=True)\n"
        "    await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[3],
    ) as hub:
        assert hub.stdout is not None
        pids = [int(pid) for pid in hub.stdout.readline().split()]
        assert len(pids) == 2
        pids.append(int((tmp_path / "child").read_text()))
        os.kill(hub.pid, signal.SIGKILL)
        hub.wait()
    asyncio.run(gone(*pids))
