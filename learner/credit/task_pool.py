"""Chooses the task of a domain's next ticket, by the policy's own pass rates. Pure.

A domain's tasks are numbered from 0. They fall into parts with weights (the files of a data set),
which get their shares of the tickets as domains do. Each part has an order of its tasks without
end: one permutation after the other, each an affine map of the places, so it needs no memory. The
next ticket gets the next task in that order which is *let in*:

- one that was never measured, always;
- one whose pass rate p is within the stage's band, with probability 4 p (1 - p), the part of the
  learning signal that binary rewards of that rate have (Foerster and Foster, arXiv 2502.12272), or
  always if the priority is ``uniform``;
- any other with probability ``explore``, so that its pass rate is measured again.

If no task of the part can be let in, all are. The draws are hashes of the place, so that the choice
depends on the state alone, and is the same on every machine.

A pass rate takes a byte: 0 to 250 are multiples of 0.004, 255 is a task that was never measured.
The state of a million tasks is one megabyte.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from hashlib import blake2b
from typing import Final, Literal

import msgspec
import numpy as np
import numpy.typing as npt

LEVELS: Final = 250
UNMEASURED: Final = 255
# Places that are looked at together, growing to the second number.
FIRST_CHUNK: Final = 32
LAST_CHUNK: Final = 2**16
# After this many permutations, and as many places as the largest chunk, the next task is let in.
MAX_PASSES: Final = 4
# The chance of a task is a number of 32 bits.
ALWAYS: Final = 2**32

Chances = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class TaskPart:
    """Consecutive tasks of a domain, and their share of its tickets in any positive unit."""

    num_tasks: int
    weight: float = 1.0


@dataclass(frozen=True)
class Stage:
    """The band of pass rates of the tasks that are given from a step on."""

    from_step: int
    low: float
    high: float


@dataclass(frozen=True)
class CurriculumRule:
    """Settings of a domain's curriculum.

    Attributes:
        stages: in the order of their steps; the first one begins at step 0.
        initial: pass rates to begin with, one byte per task, compressed; empty if there are none.
    """

    stages: tuple[Stage, ...]
    priority: Literal["learnability", "uniform"] = "learnability"
    explore: float = 0.0
    newest_weight: float = 0.5
    initial: bytes = b""

    def stage(self, step: int) -> Stage:
        """Return the stage of tickets that are issued after a number of steps."""
        return [stage for stage in self.stages if stage.from_step <= step][-1]


@dataclass(frozen=True)
class TaskRule:
    """Which tasks a domain has, and how they are chosen.

    Attributes:
        digest: of the tasks in their order; with another one all pass rates are forgotten.
        curriculum: None: all tasks of a part in turn.
    """

    parts: tuple[TaskPart, ...]
    digest: str = ""
    curriculum: CurriculumRule | None = None

    @property
    def num_tasks(self) -> int:
        """Tasks of all parts."""
        return sum(part.num_tasks for part in self.parts)


class PartState(msgspec.Struct):
    """How far a part of the tasks was passed.

    Attributes:
        cursor: places of its order that were passed.
        issued: tickets since the weights last changed.
    """

    cursor: int = 0
    issued: int = 0


class PoolState(msgspec.Struct):
    """The state of a domain's tasks, JSON-able.

    Attributes:
        since: tickets up to this number were of other tasks.
        levels: pass rate of each task, see the module; empty without a curriculum.
    """

    digest: str
    parts: list[PartState]
    since: int = 0
    levels: bytearray = msgspec.field(default_factory=bytearray)


def update_pool(pool: PoolState | None, rule: TaskRule, issued: int) -> PoolState:
    """Return the pool under a rule that is new or changed; it is ``pool`` if its tasks are.

    Args:
        issued: number of the newest ticket.
    """
    num_parts = len(rule.parts)
    if pool is None or pool.digest != rule.digest or len(pool.parts) != num_parts:
        pool = PoolState(rule.digest, [PartState() for _ in range(num_parts)], issued)
    for part in pool.parts:
        part.issued = 0
    if rule.curriculum is None:
        return pool
    num_tasks = rule.num_tasks
    if len(pool.levels) != num_tasks:
        pool.levels = bytearray([UNMEASURED]) * num_tasks
    initial = decode_levels(rule.curriculum.initial)
    if len(initial) == num_tasks:
        levels = np.frombuffer(pool.levels, np.uint8)
        known = np.frombuffer(initial, np.uint8)
        pool.levels = bytearray(np.where(levels == UNMEASURED, known, levels).tobytes())
    return pool


def observe_task(
    pool: PoolState, rule: CurriculumRule, task: int, *, successes: int, episodes: int
) -> None:
    """Update the pass rate of a task by a group of episodes."""
    if not 0 <= task < len(pool.levels) or episodes <= 0:
        return
    old = pool.levels[task]
    newest = LEVELS * successes / episodes
    level = newest if old == UNMEASURED else old + rule.newest_weight * (newest - old)
    pool.levels[task] = math.floor(level + 0.5)


def choose_task(pool: PoolState, rule: TaskRule, *, key: str, step: int) -> int:
    """Return the task of the next ticket, and pass it in the order of its part.

    Args:
        key: of the domain in this run; other orders and draws for another one.
        step: completed ones.
    """
    number = next_part(rule.parts, [part.issued for part in pool.parts])
    state = pool.parts[number]
    state.issued += 1
    first = sum(part.num_tasks for part in rule.parts[:number])
    num_tasks = rule.parts[number].num_tasks
    order = TaskOrder(f"{key}/{number}", num_tasks)
    if rule.curriculum is None:
        place = state.cursor
    else:
        levels = np.frombuffer(pool.levels, np.uint8)[first : first + num_tasks]
        place = _next_place(order, state.cursor, levels, task_chances(rule.curriculum, step))
    state.cursor = place + 1
    return first + int(order.tasks(place, 1)[0])


def next_part(parts: Sequence[TaskPart], issued: Sequence[int]) -> int:
    """Return the part that is furthest behind its share, the first one on a tie. Exact."""
    weights = [Fraction(part.weight) for part in parts]
    num_tickets = sum(issued) + 1
    total = sum(weights)
    deficits = [
        weight * num_tickets - total * count for weight, count in zip(weights, issued, strict=True)
    ]
    return deficits.index(max(deficits))


def task_chances(rule: CurriculumRule, step: int) -> Chances:
    """Return the chance of a task to be let in by its level, 256 numbers from 0 to ``ALWAYS``."""
    stage = rule.stage(step)
    chances = []
    for level in range(LEVELS + 1):
        rate = level / LEVELS
        chance = 0.0
        if stage.low <= rate <= stage.high:
            chance = 4 * rate * (1 - rate) if rule.priority == "learnability" else 1.0
        chances.append(int(max(chance, rule.explore) * ALWAYS))
    # The levels in between do not occur.
    chances += [ALWAYS] * (256 - len(chances))
    return np.array(chances, np.uint64)


def rates_of(levels: bytes | bytearray) -> npt.NDArray[np.float64]:
    """Return pass rates, (n,), nan for tasks that were never measured."""
    values = np.frombuffer(levels, np.uint8)
    return np.where(values == UNMEASURED, np.nan, values / LEVELS)


def encode_levels(rates: Mapping[int, float], num_tasks: int) -> bytes:
    """Return pass rates by task as ``CurriculumRule.initial``; empty if there are none."""
    if not rates:
        return b""
    levels = bytearray([UNMEASURED]) * num_tasks
    for task, rate in rates.items():
        levels[task] = math.floor(LEVELS * rate + 0.5)
    return zlib.compress(bytes(levels), 9)


def decode_levels(initial: bytes) -> bytes:
    """Return one level per task from ``CurriculumRule.initial``; empty if there are none."""
    return zlib.decompress(initial) if initial else b""


class TaskOrder:
    """The order of a part's tasks without end, one permutation after the other.

    Args:
        key: another key, another order.
        num_tasks: of the part.
    """

    def __init__(self, key: str, num_tasks: int) -> None:
        self._key = key
        self._num_tasks = num_tasks
        self._seed = np.uint64(_hash_text(key))

    def tasks(self, place: int, count: int) -> npt.NDArray[np.int64]:
        """Return the tasks at some places of one permutation, at most up to its end."""
        epoch, first = divmod(place, self._num_tasks)
        factor, offset = self._affine_map(epoch)
        places = np.arange(first, min(first + count, self._num_tasks), dtype=np.uint64)
        tasks = (places * np.uint64(factor) + np.uint64(offset)) % np.uint64(self._num_tasks)
        return tasks.astype(np.int64)

    def draws(self, place: int, count: int) -> npt.NDArray[np.uint64]:
        """Return a number from 0 to 2**32 - 1 for each place: the mixing steps of splitmix64."""
        mixed = np.arange(place, place + count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        mixed += self._seed
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return (mixed ^ (mixed >> np.uint64(31))) >> np.uint64(32)

    def _affine_map(self, epoch: int) -> tuple[int, int]:
        """Return factor and offset below ``num_tasks``, the factor without a common divisor."""
        number = _hash_text(f"{self._key}/{epoch}")
        offset, rest = number % self._num_tasks, number // self._num_tasks
        factor = rest % self._num_tasks
        while math.gcd(factor, self._num_tasks) != 1:
            factor = (factor + 1) % self._num_tasks
        return factor, offset


def _next_place(
    order: TaskOrder, cursor: int, levels: npt.NDArray[np.uint8], chances: Chances
) -> int:
    """Return the first place from ``cursor`` on whose task is let in."""
    place = cursor
    count = FIRST_CHUNK
    while True:
        tasks = order.tasks(place, count)
        is_let_in = order.draws(place, len(tasks)) < chances[levels[tasks]]
        if is_let_in.any():
            return place + int(is_let_in.argmax())
        is_hopeless = place == cursor and not chances[np.unique(levels)].any()
        if is_hopeless or place - cursor > max(MAX_PASSES * len(levels), LAST_CHUNK):
            return cursor
        place += len(tasks)
        count = min(2 * count, LAST_CHUNK)


def _hash_text(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")
