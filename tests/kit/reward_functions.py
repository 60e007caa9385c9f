"""Rewards of a user's own, good and bad, for the tests of the reward hub."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from rewardhub.rewards.base import ResponseFault, Scored

not_callable = 3


def length(sample: Any) -> int:
    return len(sample.response)


def scaled(sample: Any, *, factor: float, offset: float = 0.0) -> float:
    return factor * len(sample.response) + offset


def noted(sample: Any) -> Any:
    return Scored(2, {"tokens": 7})


async def parts(sample: Any) -> dict[str, float]:
    await asyncio.sleep(0.001)
    return {"brevity": -len(sample.response), "grounded": float(sample.prompt in sample.response)}


def raises(sample: Any) -> float:
    raise KeyError("no such thing")


def exits(sample: Any) -> float:
    sys.exit(3)


def crashes(sample: Any) -> float:
    os.abort()


def hangs(sample: Any) -> float:
    while True:
        time.sleep(0.01)


def hangs_on_x(sample: Any) -> float:
    while sample.response == "x":
        pass
    return 1.0


def prints(sample: Any) -> float:
    print("a reward may print", flush=True)
    os.write(1, b"even so\n")
    return 2.0


def flaky(sample: Any, *, folder: str) -> float:
    """Crashes, then raises, then works."""
    tries = len(list(Path(folder).iterdir()))
    (Path(folder) / str(tries)).touch()
    if tries == 0:
        os.abort()
    if tries == 1:
        raise ConnectionError("not yet")
    return 5.0


def forks(sample: Any, *, folder: str) -> float:
    """Leaves a grandchild that outlives it, and hangs."""
    child = os.fork()
    if child == 0:
        time.sleep(600)
        os._exit(0)
    (Path(folder) / "grandchild").write_text(str(child))
    (Path(folder) / "worker").write_text(str(os.getpid()))
    time.sleep(600)
    return 0.0


def nan(sample: Any) -> float:
    return float("nan")


def nothing(sample: Any) -> None:
    return None


def text(sample: Any) -> str:
    return "1.0"


def infinite_part(sample: Any) -> dict[str, float]:
    return {"good": 1.0, "bad": float("inf")}


_kept: list[bytearray] = []


def leaks(sample: Any) -> float:
    while True:
        _kept.append(bytearray(b"x" * (1 << 20)))


def leaks_a_little(sample: Any) -> float:
    _kept.extend(bytearray(b"x" * (1 << 20)) for _ in range(120))
    return float(os.getpid())


def prints_much(sample: Any) -> float:
    for _ in range(1000):
        print("y" * 20_000)
    return 3.0


def ten_megabytes(sample: Any) -> str:
    return "x" * 10_000_000


def too_many_parts(sample: Any) -> dict[str, float]:
    return {str(number): 0.0 for number in range(1000)}


def a_long_name(sample: Any) -> dict[str, float]:
    return {"x" * 10_000_000: 0.0}


def interrupts(sample: Any) -> float:
    raise KeyboardInterrupt


def reads_nowhere(sample: Any) -> float:
    return float(ctypes.string_at(0)[0])


def says_nothing_printable(sample: Any) -> float:
    raise ValueError("a\ud800b")


def ignores_signals(sample: Any) -> float:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    return hangs(sample)


class NoScore:
    pass


def blames(sample: Any) -> float:
    raise ResponseFault("too_costly", -1.0)


async def blames_later(sample: Any) -> float:
    await asyncio.sleep(0)
    raise ResponseFault("too_costly", -1.0)


def refuses_with_half_a_character(sample: Any) -> float:
    from broker.errors import ConfigError

    raise ConfigError("key", "value", "a\ud83db")


def names_half_a_character(sample: Any) -> dict[str, float]:
    return {"a\ud83d": 1.0}


def trl_exact(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    """TRL's form."""
    return [float(answer[0] in completions[0])]


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None
) -> dict[str, Any]:
    """verl's form."""
    return {"score": 0.5 * (ground_truth in solution_str), "turns": extra_info["num_turns"]}


def per_turn(sample: Any) -> list[float]:
    return [float(turn) for turn in range(sample.num_turns)]


def two_forms(completions: list[str], solution_str: str) -> list[float]:
    return []


def slow(sample: Any, *, folder: str, seconds: float = 0.0) -> float:
    """Takes its time, and leaves one file for each score."""
    began = Path(folder) / f"{sample.task_index}.{time.time_ns()}.began"
    began.touch()
    time.sleep(seconds)
    began.rename(began.with_suffix(".done"))
    return float(sample.num_turns)
