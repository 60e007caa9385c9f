"""EZPoints and Points24 of GymCards: a formula of all cards (Zhai et al. 2024, arXiv:2405.10292).

Every turn adds one unit: a number, an operator, or ``=``, which ends the episode. The reward is 10
if the formula uses every card once and gives 12 (two cards, ``+ *``) or 24 (four cards, ``+ - * / (
)``), else -1. A number that has no card left, or text that is not a unit, costs -1 and takes a
place in the formula. Once the formula has more than 5 or 20 places the next turn ends the episode
with -1. Values are exact, while the published games compare floating-point numbers; J, Q and K
count 10.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import Any, ClassVar, Final

import numpy as np

from broker.settings.config import Harmless, Section
from envhub.envs.base import Environment, Observation, Split, StepResult
from envhub.envs.games.formula import FormulaError, Units, evaluate, reach
from envhub.envs.text.answers import tagged

RANKS: Final = ("", "A", "2", "3", "4", "5", "6", "7", "8", "9", "10", "J", "Q", "K")
HELD_OUT_SHARE: Final = 4  # one hand in this many is held out
NUM_EVAL: Final = 256
# the place of a unit that was refused
BLANK: Final = " "


class PointsArgs(Section):
    """``env_args`` of ``ez_points``."""

    harmless: ClassVar[Harmless] = ("answer_tag",)

    # read the unit from the last <answer>…</answer> instead of the whole text
    answer_tag: bool = False


class Points24Args(PointsArgs):
    """``env_args`` of ``points24``."""

    harmless = ("answer_tag", "solvable", "faces_as_ten")

    solvable: bool = True  # only hands that can be solved; false: any four cards, as published
    faces_as_ten: bool = True  # J, Q and K count 10, else 11, 12 and 13


class EZPoints(Environment):
    """One hand at a time.

    Attributes:
        target: what the formula must give.
        operators: that may stand in it.
        limit: places of the formula, beyond which the next turn is the last.
    """

    Args = PointsArgs
    isolation = "none"
    target: ClassVar[int] = 12
    operators: ClassVar[str] = "+*"
    brackets: ClassVar[str] = ""
    limit: ClassVar[int] = 5

    def __init__(self, args: Any) -> None:
        super().__init__(args)
        self._ranks: tuple[int, ...] = ()
        self._formula: list[str] = []
        self._used: list[int] = []

    @classmethod
    def num_tasks(cls, args: Any, split: Split) -> int | None:
        return NUM_EVAL if split == "eval" else None

    def reset(self, task_index: int, split: Split, seed: int) -> Observation:
        """Deal a hand; a hash of its cards assigns it to training or to evaluation."""
        rng = np.random.default_rng(
            [seed, task_index, 0] if split == "train" else [task_index % NUM_EVAL, 1]
        )
        # until the hand belongs to the split
        while True:
            self._ranks = self._deal(rng)
            if _is_held_out(tuple(sorted(self._ranks))) is (split == "eval") and self._fair():
                break
        self._formula = []
        self._used = []
        return self._observe()

    def step(self, text: str) -> StepResult:
        unit = tagged(text, self.args.answer_tag)
        if len(self._formula) > self.limit:
            return StepResult(self._observe(), -1.0, True, self._is_unit(unit), truncated=True)
        if unit == "=":
            is_solved = self._solved()
            return StepResult(self._observe(), 10.0 if is_solved else -1.0, True, True, is_solved)
        is_allowed = self._is_unit(unit) and (not unit.isdecimal() or self._left(int(unit)))
        self._formula.append(unit if is_allowed else BLANK)
        if is_allowed and unit.isdecimal():
            self._used.append(int(unit))
        return StepResult(self._observe(), 0.0 if is_allowed else -1.0, False, is_allowed)

    def text_frame(self) -> str:
        return self._observe().text

    def demonstrate(self, rng: np.random.Generator, noise: float) -> str:
        """Return the next unit of a solution; ``=`` if there is none or the formula deviates."""
        if rng.random() < noise:
            units: list[str] = [
                *map(str, dict.fromkeys(self._numbers())),
                *self.operators,
                *self.brackets,
                "=",
            ]
            return units[int(rng.integers(len(units)))]
        plan: Units = self._plan() or ()
        progress = tuple(self._formula)
        if len(progress) < len(plan) and plan[: len(progress)] == progress:
            return plan[len(progress)]
        return "="

    def _deal(self, rng: np.random.Generator) -> tuple[int, ...]:
        """Deal a card and one that makes 12 with it, by multiplication half of the time."""
        rank = int(rng.integers(2, 14))
        number = min(rank, 10)
        partner = 12 - number
        if 12 % number == 0 and rng.random() <= 0.5:
            partner = 12 // number
        return (rank, partner) if rng.random() <= 0.5 else (partner, rank)

    def _fair(self) -> bool:
        return True

    def _value(self, rank: int) -> int:
        return min(rank, 10)

    def _numbers(self) -> list[int]:
        return [self._value(rank) for rank in self._ranks]

    def _is_unit(self, unit: str) -> bool:
        # not isdecimal, which accepts digits of other scripts and leading zeros
        number_texts = {str(number) for number in range(1, self._value(13) + 1)}
        return (
            unit in number_texts
            or unit == "="
            or (len(unit) == 1 and unit in self.operators + self.brackets)
        )

    def _left(self, number: int) -> bool:
        return self._numbers().count(number) > self._used.count(number)

    def _plan(self) -> Units | None:
        return reach(tuple(sorted(self._numbers())), self.target, self.operators)

    def _solved(self) -> bool:
        if len(self._used) != len(self._ranks):
            return False
        try:
            return evaluate([unit for unit in self._formula if unit != BLANK]) == self.target
        except FormulaError:
            return False

    def _observe(self) -> Observation:
        cards = " ".join(RANKS[rank] for rank in self._ranks)
        numbers = " ".join(map(str, self._numbers()))
        formula = " ".join(self._formula)
        text = f"Cards: {cards}\nNumbers: {numbers}\nTarget: {self.target}\nFormula: {formula}"
        text = text.rstrip()
        return Observation(text, anchor=text)


class Points24(EZPoints):
    """One hand at a time."""

    Args = Points24Args
    target = 24
    operators = "+-*/"
    brackets = "()"
    limit = 20

    def _deal(self, rng: np.random.Generator) -> tuple[int, ...]:
        return tuple(int(rank) for rank in rng.integers(1, 14, size=4))

    def _fair(self) -> bool:
        return not self.args.solvable or self._plan() is not None

    def _value(self, rank: int) -> int:
        if self.args.faces_as_ten:
            return min(rank, 10)
        return rank


@lru_cache(maxsize=65_536)
def _is_held_out(ranks: tuple[int, ...]) -> bool:
    """Return whether a sorted hand belongs to evaluation."""
    return hashlib.blake2b(bytes(ranks), digest_size=1).digest()[0] % HELD_OUT_SHARE == 0
