"""Predicts a turn from earlier ones of the same task, as far as there are any, and of the domain.

A mixed model of log lengths: ``log(tokens) = level of the turn + effect of the task + noise``, all
three normal. Tasks recur, within a group and in later epochs; the fewer of a task's turns are
known, the more its effect is drawn to zero, by the ratio of the variance within tasks to that
between them (the usual empirical Bayes estimate). Everything is a running mean that forgets slowly,
because the policy changes.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any, Final

import numpy as np

from broker.contract.lengths import HIGH
from broker.settings.config import NoArguments
from envhub.lengths.base import LengthEstimator, LengthKnowledge, UpcomingTurn

# with an entry of their own; another task with the same remainder takes the place
NUM_TASKS: Final = 4096
# later turns share the last one
LEVELS: Final = 8
# turns over which a level is a mean
LEVEL_MEMORY: Final = 256
TASK_MEMORY: Final = 32
SPREAD_MEMORY: Final = 512
LEAST_VARIANCE: Final = 1e-4  # of log lengths
# log length; no turn is longer, and its exponential is still a number
LONGEST: Final = 30.0
_Z_HIGH: Final = NormalDist().inv_cdf(HIGH)


class TaskEffects:
    """Running means of tasks, 32-bit numbers, in a table of fixed size; task 0 has no entry."""

    def __init__(self) -> None:
        self._tasks = [0] * NUM_TASKS
        self._counts = [0.0] * NUM_TASKS
        self._means = [0.0] * NUM_TASKS

    def get(self, task: int) -> tuple[float, float]:
        """Return (number of turns, mean), zeros for an unknown task."""
        place = task % NUM_TASKS
        if self._tasks[place] != task:
            return 0.0, 0.0
        return self._counts[place], self._means[place]

    def add(self, task: int, value: float) -> None:
        """Add one turn's value; the oldest ones fade."""
        if task == 0:
            return
        place = task % NUM_TASKS
        count = self._counts[place] if self._tasks[place] == task else 0.0
        mean = self._means[place] if count else 0.0
        self._tasks[place] = task
        self._counts[place] = min(count + 1, TASK_MEMORY)
        self._means[place] = mean + (value - mean) / self._counts[place]

    def arrays(self) -> tuple[Any, Any, Any]:
        """Return tasks (int32), counts and means (float32) of all entries."""
        tasks = np.array(self._tasks, np.uint32)
        places = np.flatnonzero(tasks)
        counts, means = (
            np.array(values, np.float32)[places] for values in (self._counts, self._means)
        )
        return tasks[places].view(np.int32), counts, means

    def adopt(self, tasks: Any, counts: Any, means: Any) -> None:
        """Replace all entries."""
        self.__init__()  # type: ignore[misc]
        for task, count, mean in zip(
            tasks.view(np.uint32).tolist(), counts.tolist(), means.tolist(), strict=True
        ):
            place = task % NUM_TASKS
            self._tasks[place] = task
            self._counts[place] = min(count, TASK_MEMORY)
            self._means[place] = mean


class TaskHistory(LengthEstimator):
    """Levels of turns, effects of tasks; see the module."""

    Args = NoArguments

    def __init__(self, args: Any) -> None:
        super().__init__(args)
        self._effects = TaskEffects()
        self._levels = [0.0] * LEVELS
        self._counts = [0.0] * LEVELS
        self._between = 0.0
        self._total = 0.0
        self._pairs = 0.0
        self._num_turns = 0.0

    def predict(self, turn: UpcomingTurn) -> tuple[float, float] | None:
        """Return both quantiles, None before the first turn of the domain."""
        if not self._num_turns:
            return None
        center, _ = turn.notes = self._without_task(turn)
        count, mean = self._effects.get(turn.task)
        share, within, between = self._task_share(count)
        spread = math.sqrt(within + (1 - share) * between)
        center = min(center + share * mean, LONGEST)
        return math.exp(center), math.exp(min(center + _Z_HIGH * spread, LONGEST))

    def observe(self, turn: UpcomingTurn, tokens: int) -> None:
        """Add a finished turn to its level and its task."""
        value = math.log(max(tokens, 1))
        place = min(turn.turn, LEVELS - 1)
        center, features = turn.notes or self._without_task(turn)
        residual = value - center if self._num_turns else 0.0
        count, mean = self._effects.get(turn.task)
        self._num_turns = min(self._num_turns + 1, SPREAD_MEMORY)
        self._total += (residual * residual - self._total) / self._num_turns
        # independent noise of two turns of a task leaves the variance between tasks
        if count:
            self._pairs = min(self._pairs + 1, SPREAD_MEMORY)
            self._between += (residual * mean - self._between) / self._pairs
        self._effects.add(turn.task, residual)
        # before, there is no level
        if self._num_turns > 1:
            self._learn(features, value - self._level(turn.turn), 1 - self._task_share(count)[0])
        self._counts[place] = min(self._counts[place] + 1, LEVEL_MEMORY)
        self._levels[place] += (value - self._levels[place]) / self._counts[place]

    def _without_task(self, turn: UpcomingTurn) -> tuple[float, Any]:
        """Return the expected log length for an unknown task, and the features it follows from."""
        return self._level(turn.turn), None

    def _learn(self, features: Any, above: float, weight: float) -> None:
        """Learn how features go with a log length above its level; known tasks weigh less."""

    def _task_share(self, count: float) -> tuple[float, float, float]:
        """Return the known share of a task's effect, and the variances within and between tasks."""
        between = max(self._between, 0.0)
        within = max(self._total - between, LEAST_VARIANCE)
        return count * between / (count * between + within), within, between

    def _level(self, turn: int) -> float:
        """Return the mean log length of a turn, or of the nearest earlier one that was seen."""
        place = min(turn, LEVELS - 1)
        while place and not self._counts[place]:
            place -= 1
        return self._levels[place]

    def knowledge(self) -> LengthKnowledge:
        """Return the model's means and the tasks."""
        values = [
            *self._levels,
            *self._counts,
            self._between,
            self._total,
            self._pairs,
            self._num_turns,
        ]
        return LengthKnowledge(np.array(values, np.float32), *self._effects.arrays())

    def adopt(self, knowledge: LengthKnowledge) -> bool:
        """Take over means and tasks."""
        if knowledge.values.shape != (2 * LEVELS + 4,):
            return False
        values = knowledge.values.tolist()
        self._levels = values[:LEVELS]
        self._counts = [max(value, 0.0) for value in values[LEVELS : 2 * LEVELS]]
        self._between = values[-4]
        self._total, self._pairs, self._num_turns = (max(value, 0.0) for value in values[-3:])
        self._effects.adopt(knowledge.tasks, knowledge.counts, knowledge.means)
        return True
