"""What board games of two seats share: legal and illegal moves, rewards, and a perfect player."""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, Any, ClassVar, Final, Literal

import numpy as np
from pydantic import Field

from broker.settings.config import Section
from envhub.envs.base import Environment, Observation, Split, StepResult
from envhub.envs.text.answers import tagged

SEATS: Final = ("X", "O")
EMPTY: Final = "."
WIN: Final = 1.0


class BoardGameArgs(Section):
    """``env_args`` of board games of two seats."""

    harmless = ("illegal", "illegal_reward", "success", "random_plies", "answer_tag")

    # what a text costs that is no legal move: lose ends the game, random plays a random move
    illegal: Literal["lose", "random"] = "lose"
    # of that text; the other seat gets nothing for it
    illegal_reward: Annotated[float, Field(le=0)] = -1.0
    # what counts as a success of a seat: to win, or not to lose
    success: Literal["win", "draw"] = "win"
    # most random legal moves before the first turn, the same for all episodes of a task
    random_plies: Annotated[int, Field(ge=0, le=8)] = 0
    # read the move from the last <answer>…</answer> instead of the whole text
    answer_tag: bool = False


class BoardGame(Environment):
    """One game at a time; X begins. A win is worth 1 and a loss -1, a draw 0.

    A subclass knows the board: a text of its cells.
    """

    Args = BoardGameArgs
    isolation = "none"
    first_board: ClassVar[str]

    args: BoardGameArgs

    def __init__(self, args: BoardGameArgs) -> None:
        super().__init__(args)
        self._board = self.first_board
        self._seat = SEATS[0]
        self._rng = np.random.default_rng(0)

    @classmethod
    def seats(cls, args: Any) -> tuple[str, ...]:
        return SEATS

    @staticmethod
    @abstractmethod
    def legal_moves(board: str) -> list[str]:
        """Return the texts of the legal moves."""

    @staticmethod
    @abstractmethod
    def place(board: str, move: str, seat: str) -> str:
        """Return the board after a legal move."""

    @staticmethod
    @abstractmethod
    def winner(board: str) -> str:
        """Return the seat that has won, empty if none has."""

    @classmethod
    @abstractmethod
    def best_moves(cls, board: str, seat: str) -> list[str]:
        """Return the moves that a good player makes."""

    @staticmethod
    @abstractmethod
    def show(board: str) -> str:
        """Return the board in lines."""

    def reset(self, task_index: int, split: Split, seed: int) -> Observation:
        """Start a game; of the task only the random moves at the beginning depend."""
        self._board = self.first_board
        self._seat = SEATS[0]
        self._rng = np.random.default_rng([seed, task_index, split == "eval"])
        for _ in range(int(self._rng.integers(self.args.random_plies + 1))):
            self._play(self._random_move())
            if self.winner(self._board) or not self.legal_moves(self._board):
                return self.reset(task_index + (1 << 32), split, seed)
        return self._observe()

    def step(self, text: str) -> StepResult:
        move = tagged(text, self.args.answer_tag)
        seat = self._seat
        is_valid = move in self.legal_moves(self._board)
        own_reward = 0.0 if is_valid else self.args.illegal_reward
        if not is_valid and self.args.illegal == "lose":
            successes: tuple[str, ...] = (other(seat),) if self.args.success == "draw" else ()
            return self._end(own_reward, {}, successes, is_valid=False)
        self._play(move if is_valid else self._random_move())
        if self.winner(self._board):
            rewards = {seat: WIN, other(seat): -WIN}
            return self._end(own_reward, rewards, (seat,), is_valid=is_valid)
        if not self.legal_moves(self._board):
            successes = SEATS if self.args.success == "draw" else ()
            return self._end(own_reward, {}, successes, is_valid=is_valid)
        return StepResult(self._observe(), own_reward, done=False, valid=is_valid)

    def text_frame(self) -> str:
        return self.show(self._board)

    def demonstrate(self, rng: np.random.Generator, noise: float) -> str:
        moves = self.legal_moves(self._board)
        if rng.random() >= noise:
            moves = self.best_moves(self._board, self._seat)
        return moves[int(rng.integers(len(moves)))]

    def _end(
        self,
        reward: float,
        rewards: dict[str, float],
        successes: tuple[str, ...],
        *,
        is_valid: bool,
    ) -> StepResult:
        return StepResult(
            Observation(self.show(self._board)),
            reward,
            done=True,
            valid=is_valid,
            seat_rewards=rewards,
            seat_successes=successes,
        )

    def _random_move(self) -> str:
        moves = self.legal_moves(self._board)
        return moves[int(self._rng.integers(len(moves)))]

    def _play(self, move: str) -> None:
        self._board = self.place(self._board, move, self._seat)
        self._seat = other(self._seat)

    def _observe(self) -> Observation:
        text = f"{self._seat}\n{self.show(self._board)}"
        actions = tuple(self.legal_moves(self._board))
        return Observation(text, anchor=text, seat=self._seat, actions=actions)


def other(seat: str) -> str:
    """Return the opponent of a seat."""
    return SEATS[1 - SEATS.index(seat)]
