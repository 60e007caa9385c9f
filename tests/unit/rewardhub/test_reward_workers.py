"""Real worker processes: what hangs or crashes costs one process and is told apart from a score."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from waits import LONG_S, runs

from broker.errors import UserError
from broker.settings.config import RewardConfig
from rewardhub import worker_pool as workers_module
from rewardhub.rewards.base import Sample, Scored
from rewardhub.worker_pool import NoWorkerError, RewardWorkerPool, ScoreError
from rlearner_workers import worker_process

HERE = str(Path(__file__).parents[2] / "kit" / "reward_functions.py")


def reward(name: str, **args: Any) -> RewardConfig:
    return RewardConfig(name=f"{HERE}:{name}", args=args)


def sample(response: str = "four") -> Sample:
    return Sample(
        domain="d", task_index=0, prompt="p", response=response, reference="#### 42", reward=0.0, reward_parts={},
        success=False,
        end="terminated", num_turns=1, num_tokens=1, metrics={},
    )  # fmt: skip


@pytest.fixture
async def workers() -> AsyncIterator[RewardWorkerPool]:
    pool = RewardWorkerPool(2, 1.0, [reward("length")], memory_mib=200)
    await pool.start()
    yield pool
    children = [worker.pid for worker in pool.living]
    await pool.close()
    assert not [pid for pid in children if psutil.pid_exists(pid)]


async def test_many_scores_at_once(workers: RewardWorkerPool) -> None:
    values = await asyncio.gather(
        *(workers.score(reward("length"), sample("x" * n)) for n in range(50))
    )
    assert [one.value for one in values] == [float(n) for n in range(50)]
    assert (await workers.score(reward("parts"), sample("p"))).value == {
        "brevity": -1.0,
        "grounded": 1.0,
    }
    assert workers.num_killed == 0


async def test_math_answers_in_a_worker(workers: RewardWorkerPool) -> None:
    slow_import = RewardWorkerPool(1, 30.0, [RewardConfig(name="math_answer")])
    await slow_import.start()
    try:
        assert (
            await slow_import.score(RewardConfig(name="math_answer"), sample("#### 42"))
        ).value == 1.0
        assert (
            await slow_import.score(RewardConfig(name="math_answer"), sample("#### 43"))
        ).value == 0.0
    finally:
        await slow_import.close()


@pytest.mark.parametrize(
    ("name", "detail", "killed"),
    [
        ("hangs", "hangs: no score within 1 s", 1),
        ("crashes", "crashes: the worker process died by SIGABRT", 1),
        ("raises", r"raises: KeyError: 'no such thing' \(reward_functions.py:37 in raises\)", 0),
        ("exits", r"exits: SystemExit: 3 \(reward_functions.py:41 in exits\)", 0),
    ],
)
async def test_a_bad_reward_costs_only_itself(
    workers: RewardWorkerPool, name: str, detail: str, killed: int
) -> None:
    started = time.monotonic()
    bad = asyncio.create_task(workers.score(reward(name), sample()))
    good = await asyncio.gather(*(workers.score(reward("length"), sample("ok")) for _ in range(10)))
    with pytest.raises(ScoreError, match=rf"{detail}$") as caught:
        await bad
    assert caught.value.retry
    assert good == [Scored(2.0)] * 10
    assert workers.num_killed == killed
    assert time.monotonic() - started < 60
    # Both places work again afterwards.
    assert (
        await asyncio.gather(*(workers.score(reward("length"), sample("ab")) for _ in range(4)))
        == [Scored(2.0)] * 4
    )


async def test_a_response_to_blame_gets_its_reward_at_once(workers: RewardWorkerPool) -> None:
    assert await workers.score(reward("blames"), sample("costly")) == Scored(
        -1.0, {"too_costly": 1.0}
    )
    assert await workers.score(reward("blames_later"), sample("costly")) == Scored(
        -1.0, {"too_costly": 1.0}
    )
    assert workers.num_killed == 0


async def test_costly_answers_neither_fail_nor_hold_up_their_neighbours() -> None:
    math = RewardConfig(name="math_answer")
    pool = RewardWorkerPool(2, 60.0, [math])
    await pool.start()
    try:
        costly = [
            rf"\boxed{{{formula}}}"
            for formula in (r"10^{10^{10}}", r"\binom{10^9}{5\cdot 10^8}", r"(x+y+z+w)^{200}")
        ]
        answers = [*costly, *(f"#### {n}" for n in range(40))]
        scores = await asyncio.gather(*(pool.score(math, sample(answer)) for answer in answers))
        assert scores[:3] == [Scored(0.0, {"too_costly": 1.0})] * 3
        assert scores[3:] == [Scored(0.0)] * 40
        assert pool.num_killed == 0
    finally:
        await pool.close()


async def test_a_number_that_is_none_is_not_worth_another_try(workers: RewardWorkerPool) -> None:
    with pytest.raises(ScoreError, match="must be finite, got nan") as caught:
        await workers.score(reward("nan"), sample())
    assert not caught.value.retry


async def test_each_fault_says_what_it_was(workers: RewardWorkerPool) -> None:
    faults = {
        "interrupts": r"interrupts: KeyboardInterrupt \(reward_functions.py:136 in interrupts\)$",
        "reads_nowhere": "reads_nowhere: the worker process died by SIGSEGV$",
        "ignores_signals": "ignores_signals: no score within 1 s$",
        "says_nothing_printable": r"says_nothing_printable: ValueError: a\?b "
        r"\(reward_functions.py:144 in says_nothing_printable\)$",
        "leaks": r"leaks: MemoryError \(reward_functions.py:109 in leaks\)$",
    }
    refusals = {
        "ten_megabytes": r"the reward must be a number, got str 'x+\.\.\.$",
        "too_many_parts": "a reward has at most 64 parts with printable names of at most 100 characters$",
        "a_long_name": "a reward has at most 64 parts with printable names of at most 100 characters$",
        "nothing": "the reward must be a number, got NoneType None$",
        "refuses_with_half_a_character": r"key: 'value' is not allowed; a\?b$",
        "names_half_a_character": "a reward has at most 64 parts with printable names of at most 100 characters$",
        "infinite_part": "part 'bad' must be finite, got inf$",
    }
    for name, detail in {**faults, **refusals}.items():
        with pytest.raises(ScoreError, match=detail) as caught:
            await workers.score(reward(name), sample())
        assert caught.value.retry == (name in faults)
    assert (await workers.score(reward("length"), sample("ab"))).value == 2.0


async def test_a_worker_that_has_used_much_is_replaced_before_a_score_fails_for_it() -> None:
    pool = RewardWorkerPool(1, 20.0, [], memory_mib=200)
    try:
        pids = {(await pool.score(reward("leaks_a_little"), sample())).value for _ in range(3)}
        assert len(pids) == 3
        assert pool.num_killed == 0
    finally:
        await pool.close()


async def test_a_reward_may_print(workers: RewardWorkerPool) -> None:
    assert (await workers.score(reward("prints"), sample())).value == 2.0
    assert (await workers.score(reward("length"), sample("abc"))).value == 3.0


async def test_what_a_killed_worker_started_dies_with_it(
    workers: RewardWorkerPool, tmp_path: Path
) -> None:
    with pytest.raises(ScoreError, match="no score within"):
        await workers.score(reward("forks", folder=str(tmp_path)), sample())
    for name in ("worker", "grandchild"):
        pid = int((tmp_path / name).read_text())
        for _ in range(50):
            if not runs(pid):
                break
            await asyncio.sleep(0.1)
        else:
            pytest.fail(f"{name} {pid} is still alive")


async def test_a_reward_that_cannot_be_loaded_stops_the_start() -> None:
    pool = RewardWorkerPool(2, 1.0, [reward("absent")])
    with pytest.raises(UserError, match="has no 'absent'"):
        await pool.start()
    await pool.close()
    assert not pool.living


SLOW_MODULE = """
import pathlib, sys, time
tries = pathlib.Path({path!r})
if "rewardhub.worker_pool" not in sys.modules:  # in the worker
    tries.write_text(tries.read_text() + "x")
    time.sleep(60 if len(tries.read_text()) <= {slow} else 0)
def score(sample): return 1.0
"""


def slow_reward(folder: Path, slow: int) -> RewardConfig:
    """Return a reward whose first imports never end."""
    (folder / "tries").write_text("")
    (folder / "slow.py").write_text(SLOW_MODULE.format(path=str(folder / "tries"), slow=slow))
    return RewardConfig(name=f"{folder / 'slow.py'}:score")


async def test_slow_start_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(workers_module, "START_S", (0.5, LONG_S))
    slow = slow_reward(tmp_path, 1)
    pool = RewardWorkerPool(1, 5.0, [slow])
    await pool.start()
    assert (await pool.score(slow, sample())).value == 1.0
    assert "a worker process did not load its rewards: no answer in" in caplog.text
    assert f"trying again with {LONG_S:g} s" in caplog.text
    await pool.close()


async def test_a_start_that_fails_names_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers_module, "START_S", (0.3, 0.6))
    pool = RewardWorkerPool(1, 5.0, [slow_reward(tmp_path, 9)])
    with pytest.raises(
        UserError,
        match=r"did not load its rewards: no answer in .* of processor time .*; 2 attempts",
    ):
        await pool.start()
    await pool.close()
    assert not pool.living


def test_workers_do_not_outlive_a_hub_that_is_killed(tmp_path: Path) -> None:
    code = (
        "import asyncio, sys\nfrom rewardhub.worker_pool import RewardWorkerPool\n"
        "async def main():\n"
        "    pool = RewardWorkerPool(2, 5.0, [])\n"
        "    await pool.start()\n"
        "    print(*(w.pid for w in pool.living), flush=True)\n"
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
        os.kill(hub.pid, signal.SIGKILL)
        hub.wait()
        deadline = time.monotonic() + 60
        while any(map(runs, pids)):
            assert time.monotonic() < deadline
            time.sleep(0.05)


async def test_a_machine_that_starts_no_process_is_nobodys_zero(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = RewardWorkerPool(1, 5.0, [])
    real = worker_process.start

    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError("out of processes")

    monkeypatch.setattr(worker_process, "start", refuse)
    with pytest.raises(NoWorkerError, match="cannot start a worker process: out of processes"):
        await pool.score(reward("length"), sample())
    monkeypatch.setattr(worker_process, "start", real)
    # the place was not lost
    assert (await pool.score(reward("length"), sample("abc"))).value == 3.0
    await pool.close()
