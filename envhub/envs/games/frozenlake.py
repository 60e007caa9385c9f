"""Gymnasium's FrozenLake-v1 on generated maps, as text.

The observation is the whole map, one character per cell and one row per line, with ``P`` for the
player. With ``observe: cell`` the map is shown once, and every turn shows the player's place and
neighbours: row and column from 0, then the neighbours in the order of the moves, ``#`` beyond the
edge (``1 0 #FHS``); it costs half the tokens. The action is one letter of ``LDRU``. The reward is 1
on the goal, 0 in a hole, minus the optional penalties.
"""

from __future__ import annotations

import copy
import os
from functools import lru_cache
from typing import Annotated, Any, Final, Literal

import numpy as np
from pydantic import Field, NonNegativeFloat

from broker.settings.config import Section
from envhub.envs.base import Environment, Frame, Observation, Split, StepResult
from envhub.envs.games import lakes
from envhub.envs.text.answers import MOVES, one_of

# the player on ice, fallen in, at the goal
PLAYER: Final = {"S": "P", "F": "P", "H": "X", "G": "*"}
FALL_COLOUR: Final = (207, 34, 46)


class FrozenLakeArgs(Section):
    """``env_args`` of ``frozenlake``."""

    harmless = (
        "size", "hole_probability", "is_slippery", "success_rate", "step_penalty", "format_penalty",
        "observe", "answer_tag",
    )  # fmt: skip

    size: Annotated[int, Field(ge=2, le=16)] = 4
    hole_probability: Annotated[float, Field(ge=0, lt=1)] = 0.2
    is_slippery: bool = False
    # share of moves that succeed on slippery ice
    success_rate: Annotated[float, Field(gt=0, le=1)] = 1 / 3
    step_penalty: NonNegativeFloat = 0.0  # taken from the reward at every turn
    format_penalty: NonNegativeFloat = 0.0  # taken from the reward for text that is not a move
    observe: Literal["map", "cell"] = "map"  # the whole map at every turn, or at the first one only
    # read the move from the last <answer>…</answer> instead of the whole text
    answer_tag: bool = False


@lru_cache(maxsize=1024)
def _make_lake(lake: lakes.Map, is_slippery: bool, success_rate: float) -> Any:
    """Return gymnasium's environment for a map; copies share its constant transition table."""
    from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv

    return FrozenLakeEnv(desc=list(lake), is_slippery=is_slippery, success_rate=success_rate)


@lru_cache(maxsize=8192)  # the episodes of a group see the same cells many times
def _draw_map(lake: lakes.Map, cell: int) -> str:
    """Return the map with the player on it."""
    cells = "".join(lake)
    size = len(lake)
    drawing = cells[:cell] + PLAYER[cells[cell]] + cells[cell + 1 :]
    return "\n".join(drawing[start : start + size] for start in range(0, size * size, size))


def _describe_cell(lake: lakes.Map, cell: int) -> str:
    """Return row, column and the four neighbours of the player, for example ``1 0 #FHS``."""
    row, column = divmod(cell, len(lake))
    inside = range(len(lake))
    around = [(row + down, column + right) for down, right in lakes.MOVES]
    cells = "".join(lake[r][c] if r in inside and c in inside else "#" for r, c in around)
    return f"{row} {column} {cells}"


@lru_cache(maxsize=8192)
def _make_observation(
    lake: lakes.Map, cell: int, observe: Literal["map", "cell"], is_first: bool
) -> Observation:
    frame = _draw_map(lake, cell)
    if observe == "map":
        return Observation(frame, anchor=frame)
    around = _describe_cell(lake, cell)
    return Observation(f"{frame}\n{around}" if is_first else around, anchor=frame)


def _mark_fall(picture: Frame, size: int, cell: int) -> None:
    """Cross out a cell: gymnasium's picture of a fall hardly differs from that of a hole."""
    side = len(picture) // size
    row, column = divmod(cell, size)
    square = picture[row * side : (row + 1) * side, column * side : (column + 1) * side]
    down, right = np.indices(square.shape[:2])
    is_cross = np.minimum(abs(down - right), abs(down + right - side + 1)) <= side // 20
    square[is_cross] = FALL_COLOUR


class FrozenLake(Environment):
    """One lake at a time."""

    Args = FrozenLakeArgs
    isolation = "none"

    args: FrozenLakeArgs
    map: lakes.Map

    def __init__(self, args: FrozenLakeArgs) -> None:
        super().__init__(args)
        self._lake: Any = None
        self._painter: Any = None
        self._cell = self._turns = 0

    @classmethod
    def check(cls, args: FrozenLakeArgs) -> None:
        lakes.train_map(args.size, args.hole_probability, 0, 0)
        lakes.held_out_maps(args.size, args.hole_probability)

    @classmethod
    def num_tasks(cls, args: FrozenLakeArgs, split: Split) -> int | None:
        if split == "train":
            return None
        return len(lakes.held_out_maps(args.size, args.hole_probability))

    def reset(self, task_index: int, split: Split, seed: int) -> Observation:
        size = self.args.size
        holes = self.args.hole_probability
        if split == "eval":
            maps = lakes.held_out_maps(size, holes)
            self.map = maps[task_index % len(maps)]
        else:
            self.map = lakes.train_map(size, holes, seed, task_index)
        self._lake = copy.copy(_make_lake(self.map, self.args.is_slippery, self.args.success_rate))
        self._painter = None
        # gymnasium's first state too: the only S
        self._cell = 0
        self._lake.lastaction = None
        if self.args.is_slippery:
            self._lake.reset(seed=seed)  # seeds the ice
        self._turns = 0
        return self._observe()

    def step(self, text: str) -> StepResult:
        letter = self.parse(text)
        self._turns += 1
        reward = -self.args.step_penalty
        is_done = False
        if letter is None:
            reward -= self.args.format_penalty
        else:
            self._cell, gained, is_done = self._move(lakes.LETTERS.index(letter))
            reward += float(gained)
        success = bool(is_done and self._under_player() == "G")
        return StepResult(self._observe(), reward, bool(is_done), letter is not None, success)

    def _move(self, action: int) -> tuple[int, float, bool]:
        """Return (cell, reward, done); on firm ice directly from gymnasium's table."""
        if self.args.is_slippery:
            cell, gained, is_done, _, _ = self._lake.step(action)
            return cell, gained, is_done
        ((_, cell, gained, is_done),) = self._lake.P[self._cell][action]
        self._lake.lastaction = action
        return cell, gained, is_done

    def parse(self, text: str) -> str | None:
        """Return the letter of the text's move, None if it is not a move."""
        return one_of(text, MOVES, self.args.answer_tag)

    def text_frame(self) -> str:
        return _draw_map(self.map, self._cell)

    def render_frame(self) -> Frame:
        if self._painter is None:
            # pygame needs no screen, and its greeting belongs into no log
            os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
            os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
            self._painter = copy.copy(self._lake)
            self._painter.render_mode = "rgb_array"
        self._painter.s = self._cell
        self._painter.lastaction = self._lake.lastaction
        picture = np.array(self._painter.render(), dtype=np.uint8)
        if self._under_player() == "H":
            _mark_fall(picture, self.args.size, self._cell)
        return picture

    def demonstrate(self, rng: np.random.Generator, noise: float) -> str:
        best = lakes.best_moves(self.map, self._cell)
        if best and rng.random() >= noise:
            # always the same of several best moves: a consistent solver is easier to learn from
            return best[0]
        return lakes.LETTERS[int(rng.integers(len(lakes.LETTERS)))]

    def _observe(self) -> Observation:
        return _make_observation(self.map, self._cell, self.args.observe, self._turns == 0)

    def _under_player(self) -> str:
        row, column = divmod(self._cell, self.args.size)
        return self.map[row][column]
