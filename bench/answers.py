"""Score adversarial and equivalent answers by ``math_answer`` in worker processes, as a reward hub
does.

    python -m bench.answers [--workers 2] [--every 1]

The last line is JSON: ``adversarial`` counts the attacks, ``pairs`` the answers with a reference,
of ``kinds`` with both verdicts; ``voided`` had no score, which would void a group; ``over_2_s``
took longer by the clock, and of processor time when judged again alone: a busy machine makes no
answer costly; ``executed`` created a file that only code in an answer would create;
``wrong_verdicts``; ``slowest_s``; ``neighbours_s``, the time of 40 plain answers next to a costly
one; ``per_s``, ordinary answers per second, and ``per_cpu_s`` per second of processor time of a
worker. The cases are in ``bench.support.answer_cases``, ``answer_pairs`` and ``answer_structures``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Final, NamedTuple

import psutil

from bench.support.answer_cases import CANARY, adversarial
from bench.support.answer_pairs import AnswerPair, pairs
from broker.settings.config import RewardConfig
from broker.system.process_tree import process_tree
from rewardhub.rewards.base import Sample
from rewardhub.worker_pool import RewardWorkerPool, ScoreError

REWARD: Final = RewardConfig(name="math_answer")
TIMEOUT_S: Final = 10.0  # rewardhub.timeout_s
LIMIT_S: Final = 2.0
ORDINARY: Final = 6000


class AnswerOutcome(NamedTuple):
    """What became of one answer; ``right`` is None without a score."""

    right: bool | None
    seconds: float


def sample(response: str, reference: str) -> Sample:
    return Sample(
        domain="math", task_index=0, prompt="", response=response, reference=reference, reward=0.0, reward_parts={},
        success=False, end="terminated", num_turns=1, num_tokens=1, metrics={},
    )  # fmt: skip


async def judge(
    workers: RewardWorkerPool, cases: Sequence[AnswerPair], at_once: int
) -> list[AnswerOutcome]:
    """Judge all cases with at most ``at_once`` at a time, so that none waits for another."""
    room = asyncio.Semaphore(at_once)

    async def one(case: AnswerPair) -> AnswerOutcome:
        async with room:
            started = time.monotonic()
            try:
                value = (await workers.score(REWARD, sample(case.response, case.reference))).value
            except ScoreError as error:
                print(f"voided: {case.response[:80]!r} against {case.reference[:40]!r}: {error}")
                return AnswerOutcome(None, time.monotonic() - started)
            return AnswerOutcome((value == 1.0) == case.equal, time.monotonic() - started)

    found = await asyncio.gather(*map(one, cases))
    for case, outcome in zip(cases, found, strict=True):
        if outcome.right is False:
            must = "equal" if case.equal else "different"
            print(f"wrong: {case.response[:80]!r} against {case.reference[:60]!r} must be {must}")
        if outcome.seconds > LIMIT_S:
            print(f"slow: {case.response[:80]!r}: {outcome.seconds:.1f} s")
    return found


def spent_s(workers: RewardWorkerPool) -> float:
    """Return the processor seconds of all workers and of the processes that they forked, also of
    those that ended.
    """
    processes = [
        psutil.Process(pid) for worker in workers.living for pid in process_tree(worker.pid)
    ]
    times = [process.cpu_times() for process in processes]
    return sum(one.user + one.system + one.children_user + one.children_system for one in times)


async def processor_s(workers: RewardWorkerPool, case: AnswerPair) -> float:
    """Return the processor time of judging one answer while the workers do nothing else."""
    before = spent_s(workers)
    await judge(workers, [case], 1)
    return spent_s(workers) - before


async def measure(num_workers: int, every: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        texts = [text.replace(CANARY, f"{folder}/made_{n}") for n, text in enumerate(adversarial())]
        attacks = [AnswerPair(text, "#### 18", False) for text in texts][::every]
        known = pairs()[::every]
        workers = RewardWorkerPool(num_workers, TIMEOUT_S, [REWARD], memory_mib=4096)
        await workers.start()
        try:
            outcomes = [
                *await judge(workers, attacks, num_workers),
                *await judge(workers, known, num_workers),
            ]
            executed = len(os.listdir(folder))
            costly = asyncio.create_task(
                workers.score(REWARD, sample(r"\boxed{\binom{10^9}{5\cdot 10^8}}", "#### 18"))
            )
            plain = [AnswerPair(f"#### {n}", "18", n == 18) for n in range(40)]
            started = time.monotonic()
            await judge(workers, plain, 40)
            neighbours_s = time.monotonic() - started
            await costly
            made = [
                (f"{n} apples and 1 more.\n#### {n + 1}", f"{n}+1\n#### {n + 1:,}")
                for n in range(ORDINARY // every)
            ]
            ordinary = [AnswerPair(response, reference, True) for response, reference in made]
            ordinary[::2] = [
                AnswerPair(f"It is $\\boxed{{{n}}}$.", str(n), True)
                for n in range(len(ordinary[::2]))
            ]
            started = time.monotonic()
            cpu_s = spent_s(workers)
            outcomes += await judge(workers, ordinary, 8 * num_workers)
            per_s = len(ordinary) / (time.monotonic() - started)
            per_cpu_s = len(ordinary) / max(spent_s(workers) - cpu_s, 1e-9)
            cases = [*attacks, *known, *ordinary]
            slow = [
                case
                for case, outcome in zip(cases, outcomes, strict=True)
                if outcome.seconds > LIMIT_S
            ]
            alone_s = [await processor_s(workers, case) for case in slow]
        finally:
            await workers.close()
    figures: dict[str, float] = {"adversarial": len(attacks), "pairs": len(known)}
    figures |= {
        "kinds": len(
            {pair.kind for pair in known if pair.equal}
            & {pair.kind for pair in known if not pair.equal}
        )
    }
    figures |= {"voided": sum(one.right is None for one in outcomes)}
    figures |= {"over_2_s": sum(seconds > LIMIT_S for seconds in alone_s), "executed": executed}
    figures |= {
        "over_2_s_by_the_clock": len(slow),
        "slowest_cpu_s": round(max(alone_s, default=0.0), 2),
    }
    figures |= {"wrong_verdicts": sum(one.right is False for one in outcomes)}
    figures |= {
        "killed_workers": workers.num_killed,
        "slowest_s": round(max(one.seconds for one in outcomes), 2),
    }
    return figures | {
        "neighbours_s": round(neighbours_s, 2),
        "per_s": round(per_s, 1),
        "per_cpu_s": round(per_cpu_s, 1),
    }


def main() -> int:
    """Measure; return 0 if no answer was voided, late, executed or judged wrongly."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.answers", description="Check answers to math_answer."
    )
    parser.add_argument("--workers", type=int, default=2, help="worker processes (2)")
    parser.add_argument("--every", type=int, default=1, help="judge every n-th case only (1)")
    options = parser.parse_args()
    result = asyncio.run(measure(options.workers, options.every))
    print(json.dumps(result))
    return (
        0
        if not any(result[name] for name in ("voided", "over_2_s", "executed", "wrong_verdicts"))
        else 1
    )


if __name__ == "__main__":
    sys.exit(main())
