"""Tic-tac-toe for two seats. Moves are 1 to 9: the squares in the order of reading.

The player sees its mark and the board, with the number of each free square::

    X
    X2O
    456
    78O
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from envhub.envs.games.board_game import EMPTY, BoardGame, other

LINES: Final = (
    (0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6),
)  # fmt: skip


class TicTacToe(BoardGame):
    """One game at a time."""

    first_board = EMPTY * 9

    @staticmethod
    def legal_moves(board: str) -> list[str]:
        return [str(square + 1) for square, mark in enumerate(board) if mark == EMPTY]

    @staticmethod
    def place(board: str, move: str, seat: str) -> str:
        square = int(move) - 1
        return board[:square] + seat + board[square + 1 :]

    @staticmethod
    def winner(board: str) -> str:
        for first, second, third in LINES:
            if board[first] != EMPTY and board[first] == board[second] == board[third]:
                return board[first]
        return ""

    @classmethod
    def best_moves(cls, board: str, seat: str) -> list[str]:
        """Return the moves of perfect play."""
        values = {
            move: -_value(cls.place(board, move, seat), other(seat))
            for move in cls.legal_moves(board)
        }
        best = max(values.values())
        return [move for move, value in values.items() if value == best]

    @staticmethod
    def show(board: str) -> str:
        squares = [str(square + 1) if mark == EMPTY else mark for square, mark in enumerate(board)]
        return "\n".join("".join(squares[row : row + 3]) for row in (0, 3, 6))


@lru_cache(maxsize=8192)
def _value(board: str, seat: str) -> int:
    """Return 1, 0 or -1: what perfect play is worth to the seat whose turn it is."""
    if TicTacToe.winner(board):
        return -1
    moves = TicTacToe.legal_moves(board)
    if not moves:
        return 0
    return max(-_value(TicTacToe.place(board, move, seat), other(seat)) for move in moves)
