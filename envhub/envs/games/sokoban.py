"""Sokoban: push every box onto a target, in generated levels or levels from Boxoban's files.

The rules and the rewards are those of gym-sokoban (Schrader 2018,
``gym_sokoban/envs/sokoban_env.py``): -0.1 a turn, +1 if one more box stands on a target than
before, -1 if one less does, +10 if all do, which ends the episode. A move into a wall and an
impossible push change nothing. The difficulties and their characters are those of ROLL's
SimpleSokoban, LargerSokoban and SokobanDifferentGridVocab (Wang et al. 2025, arXiv:2506.06122),
with ``*`` for its check mark.

With ``observe: cells`` the map is shown once, and every turn shows the player's place, its four
neighbours in the order ``LDRU``, then the places of the boxes and the targets: ``12 X_## 11 03``. A
place is its row and its column within the outer walls, one character each, ``0`` to ``9``, then
``a`` to ``z``. With ``observe: ways`` there is no map: after the player's neighbours come, for each
box, the way from the player to it, its neighbours, and the way from it to the nearest target:
``X_## U1L2 _#__ D1`` (one up and two left; one down; ``=`` if it is there). Small models learn
fastest from that, as nothing needs to be subtracted.
"""

from __future__ import annotations

import string
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import numpy as np
from pydantic import Field, NonNegativeFloat, PositiveInt

from broker.errors import ConfigError
from broker.settings.config import DataPath, Section
from envhub.envs.base import Environment, Frame, Observation, Split, StepResult
from envhub.envs.games import sokoban_board as board
from envhub.envs.games import sokoban_levels as levels
from envhub.envs.games.sokoban_board import LETTERS, XSB, SokobanLevel, cells_of, draw, kinds, move
from envhub.envs.games.sokoban_solver import solve
from envhub.envs.text.answers import MOVES, one_of

VOCABULARIES: Final = {"symbols": "#_O*XPS", "letters": "W.GCBA@", "xsb": XSB}
# (rows and columns, boxes)
SIZES: Final = {"simple": (6, 1), "larger": (8, 2), "different_vocab": (6, 1)}
DIGITS: Final = string.digits + string.ascii_lowercase
PIXELS: Final = 24  # of a cell's side in pictures
COLOURS = (
    (70, 70, 80),
    (235, 225, 200),
    (200, 60, 60),
    (90, 170, 90),
    (190, 130, 60),
    (60, 90, 200),
    (60, 90, 200),
)


class SokobanArgs(Section):
    """``env_args`` of ``sokoban``."""

    harmless = (
        "difficulty", "size", "boxes", "pulls", "max_solution", "eval_share", "vocab", "border",
        "observe", "answer_tag", "step_penalty", "box_reward", "solved_reward", "format_penalty",
    )  # fmt: skip

    difficulty: Literal["simple", "larger", "different_vocab"] = "simple"
    # rows and columns with the outer walls; None: by difficulty
    size: Annotated[int, Field(ge=5, le=16)] | None = None
    boxes: Annotated[int, Field(ge=1, le=6)] | None = None  # None: by difficulty
    # steps that the generator plays backwards; more make it harder
    pulls: Annotated[int, Field(ge=1, le=1000)] = 30
    max_solution: PositiveInt | None = None  # most moves of a shortest solution; None: any
    path: DataPath | None = None  # level file, or folder of them, instead of generated levels
    eval_path: DataPath | None = None  # for evaluation; None: the share below
    # of the levels of ``path``, taken from their end
    eval_share: Annotated[float, Field(gt=0, lt=1)] = 0.05
    # None: letters for different_vocab, else symbols
    vocab: Literal["symbols", "letters", "xsb"] | None = None
    border: bool = True  # show the outermost ring, which is all wall
    # the map at every turn, at the first one, or not; see above
    observe: Literal["map", "cells", "ways"] = "map"
    # read the move from the last <answer>…</answer> instead of the whole text
    answer_tag: bool = False
    step_penalty: NonNegativeFloat = 0.1  # taken from the reward at every turn
    # for a box pushed onto a target, and minus this for one pushed off
    box_reward: NonNegativeFloat = 1.0
    solved_reward: NonNegativeFloat = 10.0
    format_penalty: NonNegativeFloat = 0.0  # taken from the reward for text that is not a move

    @property
    def shape(self) -> tuple[int, int]:
        """(rows and columns, boxes) of generated levels."""
        size, boxes = SIZES[self.difficulty]
        return self.size or size, self.boxes or boxes

    @property
    def characters(self) -> str:
        """One character for each kind of cell."""
        return VOCABULARIES[
            self.vocab or ("letters" if self.difficulty == "different_vocab" else "symbols")
        ]


class Sokoban(Environment):
    """One level at a time."""

    Args = SokobanArgs
    isolation = "none"

    args: SokobanArgs
    level: SokobanLevel

    def __init__(self, args: SokobanArgs) -> None:
        super().__init__(args)
        self._player = self._boxes = self._turns = self._effective = 0
        self._plan: str | None = None  # moves that solve the present state, if computed

    @classmethod
    def check(cls, args: SokobanArgs) -> None:
        if args.path is None:
            if args.eval_path is not None:
                allowed = "null without path: generated levels include levels for evaluation"
                raise ConfigError("eval_path", args.eval_path, allowed)
            levels.train_level(*args.shape, args.pulls, args.max_solution, 0, 0)
            levels.held_out_levels(*args.shape, args.pulls, args.max_solution)
            return
        for key in ("size", "boxes", "max_solution"):
            if getattr(args, key) is not None:
                raise ConfigError(
                    key, getattr(args, key), "unset with path: levels from files are not generated"
                )
        # the files may have changed since the last check
        levels.read_levels.cache_clear()
        _split_levels.cache_clear()
        if not _split_levels(args, "train"):
            raise ConfigError(
                "eval_share", args.eval_share, "a smaller share: it leaves no level for training"
            )

    @classmethod
    def data_files(cls, args: SokobanArgs) -> list[str]:
        return [
            file
            for path in (args.path, args.eval_path)
            if path is not None
            for file in levels.level_files(path)
        ]

    @classmethod
    def num_tasks(cls, args: SokobanArgs, split: Split) -> int | None:
        if args.path is None and split == "train":
            return None  # generated without end
        return len(_split_levels(args, split))

    @classmethod
    def example(cls, folder: Path) -> dict[str, Any]:
        return {"max_solution": 30}

    def reset(self, task_index: int, split: Split, seed: int) -> Observation:
        if self.args.path is None and split == "train":
            self.level = levels.train_level(
                *self.args.shape, self.args.pulls, self.args.max_solution, seed, task_index
            )
        else:
            split_levels = _split_levels(self.args, split)
            self.level = split_levels[task_index % len(split_levels)]
        self._player = self.level.player
        self._boxes = self.level.boxes
        self._turns = self._effective = 0
        self._plan = None
        return self._observe()

    def step(self, text: str) -> StepResult:
        letter = one_of(text, MOVES, self.args.answer_tag)
        self._turns += 1
        old_count = self._on_target()
        reward = -self.args.step_penalty
        if letter is None:
            reward -= self.args.format_penalty
        else:
            self._go(letter)
        count = self._on_target()
        reward += self.args.box_reward * (count - old_count)
        is_solved = count == self._boxes.bit_count()
        reward += self.args.solved_reward * is_solved
        metrics = {
            "boxes_on_target": count / self._boxes.bit_count(),
            "effective_moves": self._effective / self._turns,
        }
        return StepResult(
            self._observe(), reward, is_solved, letter is not None, is_solved, metrics=metrics
        )

    def text_frame(self) -> str:
        return draw(
            self.level.room, self._player, self._boxes, self.args.characters, self.args.border
        )

    def render_frame(self) -> Frame:
        room = self.level.room
        return _draw_picture(bytes(kinds(room, self._player, self._boxes)), room.width).copy()

    def demonstrate(self, rng: np.random.Generator, noise: float) -> str:
        """Return a move of a shortest solution (a short one with many boxes), else a random one."""
        if rng.random() >= noise:
            if self._plan is None:
                self._plan = solve(self.level.room, self._player, self._boxes) or ""
            if self._plan:
                return self._plan[0]
        return LETTERS[int(rng.integers(len(LETTERS)))]

    def _go(self, letter: str) -> None:
        state = move(self.level.room, self._player, self._boxes, LETTERS.index(letter))
        if state == (self._player, self._boxes):
            return
        self._player, self._boxes = state
        self._effective += 1
        if self._plan and self._plan[0] == letter:
            self._plan = self._plan[1:]
        else:
            self._plan = None

    def _on_target(self) -> int:
        return (self._boxes & self.level.room.targets).bit_count()

    def _observe(self) -> Observation:
        frame = self.text_frame()
        if self.args.observe == "map":
            return Observation(frame, anchor=frame)
        if self.args.observe == "ways":
            return Observation(self._ways(), anchor=frame)
        cells = self._cells()
        return Observation(cells if self._turns else f"{frame}\n{cells}", anchor=frame)

    def _cells(self) -> str:
        room = self.level.room
        places = (cells_of(bits) for bits in (self._boxes, room.targets))
        boxes, targets = (" ".join(self._name(cell) for cell in cells) for cells in places)
        return f"{self._name(self._player)} {self._around(self._player)} {boxes} {targets}"

    def _ways(self) -> str:
        parts = [self._around(self._player)]
        width = self.level.room.width
        targets = cells_of(self.level.room.targets)
        for box in cells_of(self._boxes):
            _, nearest = min(
                (sum(map(abs, _cell_offset(box, target, width))), target) for target in targets
            )
            parts += [
                _describe_way(self._player, box, width),
                self._around(box),
                _describe_way(box, nearest, width),
            ]
        return " ".join(parts)

    def _around(self, cell: int) -> str:
        """Return the characters of the four neighbours."""
        cells = kinds(self.level.room, self._player, self._boxes)
        return "".join(self.args.characters[cells[cell + step]] for step in self.level.room.steps)

    def _name(self, cell: int) -> str:
        row, column = divmod(cell, self.level.room.width)
        return DIGITS[row - 1] + DIGITS[column - 1]


def _cell_offset(start: int, end: int, width: int) -> tuple[int, int]:
    """Return the rows down and columns right from one cell to another."""
    return end // width - start // width, end % width - start % width


def _describe_way(start: int, end: int, width: int) -> str:
    down, right = _cell_offset(start, end, width)
    vertical = f"{'D' if down > 0 else 'U'}{abs(down)}" if down else ""
    horizontal = f"{'R' if right > 0 else 'L'}{abs(right)}" if right else ""
    return vertical + horizontal or "="


@lru_cache(maxsize=32)
def _split_levels(args: SokobanArgs, split: Split) -> tuple[SokobanLevel, ...]:
    """Return the levels of a finite split; training leaves out the levels of evaluation."""
    if args.path is None:
        return levels.held_out_levels(*args.shape, args.pulls, args.max_solution)
    own = [level for file in levels.level_files(args.path) for level in levels.read_levels(file)]
    if args.eval_path is None:
        num_held_out = max(round(len(own) * args.eval_share), 1)
        eval_levels = own[len(own) - num_held_out :]
    else:
        try:
            eval_levels = [
                level
                for file in levels.level_files(args.eval_path)
                for level in levels.read_levels(file)
            ]
        except ConfigError as error:
            raise ConfigError("eval_path", error.value, error.allowed) from None
    if split == "eval":
        return tuple(eval_levels)
    # one file for both: it is only evaluated
    excluded = set() if args.path == args.eval_path else set(eval_levels)
    return tuple(level for level in own if level not in excluded)


@lru_cache(maxsize=256)
def _draw_picture(cells: bytes, width: int) -> Frame:
    """Draw targets as dots, boxes as squares (green on a target), the player as a disc.

    Args:
        cells: what is on each, row by row, as gym-sokoban's numbers.
    """
    middle = np.abs(np.arange(PIXELS) - (PIXELS - 1) / 2)
    far = np.hypot(middle[:, None], middle[None, :])
    box = np.maximum(middle[:, None], middle[None, :]) < PIXELS * 0.4
    player = far < PIXELS * 0.35
    inside = {
        board.WALL: far >= 0,
        board.TARGET: far < PIXELS * 0.15,
        board.BOX: box,
        board.PLAYER: player,
    }
    inside |= {board.BOX_ON_TARGET: box, board.PLAYER_ON_TARGET: player}
    tiles = np.full((len(COLOURS), PIXELS, PIXELS, 3), COLOURS[board.FLOOR], dtype=np.uint8)
    for kind, pixels in inside.items():
        tiles[kind, pixels] = COLOURS[kind]
    # (rows, columns, PIXELS, PIXELS, 3)
    grid = tiles[np.frombuffer(cells, dtype=np.uint8).reshape(-1, width)]
    rows, columns = grid.shape[:2]
    return grid.transpose(0, 2, 1, 3, 4).reshape(rows * PIXELS, columns * PIXELS, 3)
