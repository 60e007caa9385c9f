"""Score every reference solution of a GSM8K-format JSONL by the math reward; all must score 1.

    python -m bench.score_references FILE [--workers 2]

The solutions take the path of a policy's answers: through worker processes, as responses compared
with their own references. A second pass gives each question another one's solution, which must
score 0. The last line is one JSON object: rows, correct, wrong_scored_zero (of those whose answer
differs), seconds, scores_per_s.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence

from broker.errors import DataError, UserError
from broker.settings.config import RewardConfig
from rewardhub.rewards.base import Sample, total_value
from rewardhub.worker_pool import RewardWorkerPool

REWARD = RewardConfig(name="math_answer")


def read(path: str) -> list[tuple[str, str]]:
    """Return (question, answer) of every row; raise UserError without a file, DataError for a bad
    row.
    """
    rows = []
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                try:
                    row = json.loads(line)
                    rows.append((str(row["question"]), str(row["answer"])))
                except (ValueError, KeyError, TypeError):
                    raise DataError(
                        path, number, "no JSON object with question and answer"
                    ) from None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    return rows


def _final(answer: str) -> str:
    return answer.rpartition("####")[2].strip().replace(",", "")


async def score_all(
    workers: RewardWorkerPool, pairs: Sequence[tuple[str, str, str]]
) -> list[float]:
    async def one(index: int, question: str, response: str, reference: str) -> float:
        sample = Sample(
            domain="math", task_index=index, prompt=question, response=response, reference=reference, reward=0.0,
            reward_parts={}, success=False, end="terminated", num_turns=1, num_tokens=1, metrics={},
        )  # fmt: skip
        return total_value((await workers.score(REWARD, sample)).value)

    return await asyncio.gather(*(one(index, *pair) for index, pair in enumerate(pairs)))


async def measure(path: str, num_workers: int) -> dict[str, float]:
    """Score right and wrong solutions; print rows whose own solution does not score 1."""
    rows = read(path)
    workers = RewardWorkerPool(num_workers, 10.0, [REWARD])
    await workers.start()
    try:
        started = time.monotonic()
        right = await score_all(workers, [(question, answer, answer) for question, answer in rows])
        seconds = time.monotonic() - started
        others = [*rows[1:], *rows[:1]]
        differ = [
            (q, other, a)
            for (q, a), (_, other) in zip(rows, others, strict=True)
            if _final(a) != _final(other)
        ]
        wrong = await score_all(workers, differ)
    finally:
        await workers.close()
    for number, ((_, answer), value) in enumerate(zip(rows, right, strict=True), start=1):
        if value != 1.0:
            print(f"{path}:{number}: its own solution scores {value}: …{answer[-60:]!r}")
    figures: dict[str, float] = {"rows": len(rows), "correct": sum(value == 1.0 for value in right)}
    figures |= {
        "wrong_rows": len(differ),
        "wrong_scored_zero": sum(value == 0.0 for value in wrong),
    }
    return figures | {
        "seconds": round(seconds, 2),
        "scores_per_s": round(len(rows) / max(seconds, 1e-9), 1),
    }


def main() -> int:
    """Measure; return 0 if every solution scores 1 and every wrong one 0."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.score_references", description="Score reference solutions."
    )
    parser.add_argument(
        "file", help="JSONL with question and answer, the answer ending in #### and a number"
    )
    parser.add_argument("--workers", type=int, default=2, help="worker processes (2)")
    options = parser.parse_args()
    try:
        result = asyncio.run(measure(options.file, options.workers))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(result))
    return (
        0
        if result["correct"] == result["rows"]
        and result["wrong_scored_zero"] == result["wrong_rows"]
        else 1
    )


if __name__ == "__main__":
    sys.exit(main())
