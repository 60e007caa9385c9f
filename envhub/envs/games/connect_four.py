"""Connect Four for two seats: seven columns, six rows, four in a line win. Moves are 1 to 7."""

from __future__ import annotations

from typing import Final

from envhub.envs.games.board_game import EMPTY, BoardGame, other

COLUMNS: Final = 7
ROWS: Final = 6
_STEPS: Final = ((0, 1), (1, 0), (1, 1), (1, -1))


def _make_lines() -> tuple[tuple[int, ...], ...]:
    lines = []
    for row in range(ROWS):
        for column in range(COLUMNS):
            for down, right in _STEPS:
                cells = [(row + down * k, column + right * k) for k in range(4)]
                if all(0 <= r < ROWS and 0 <= c < COLUMNS for r, c in cells):
                    lines.append(tuple(r * COLUMNS + c for r, c in cells))
    return tuple(lines)


LINES: Final = _make_lines()


class ConnectFour(BoardGame):
    """One game at a time; row 0 is the highest."""

    first_board = EMPTY * (ROWS * COLUMNS)

    @staticmethod
    def legal_moves(board: str) -> list[str]:
        return [str(column + 1) for column in range(COLUMNS) if board[column] == EMPTY]

    @staticmethod
    def place(board: str, move: str, seat: str) -> str:
        column = int(move) - 1
        row = max(row for row in range(ROWS) if board[row * COLUMNS + column] == EMPTY)
        cell = row * COLUMNS + column
        return board[:cell] + seat + board[cell + 1 :]

    @staticmethod
    def winner(board: str) -> str:
        for line in LINES:
            mark = board[line[0]]
            if mark != EMPTY and all(board[cell] == mark for cell in line):
                return mark
        return ""

    @classmethod
    def best_moves(cls, board: str, seat: str) -> list[str]:
        """Return the moves of a player that looks two moves ahead: it wins, else does not lose."""
        moves = cls.legal_moves(board)
        boards = {move: cls.place(board, move, seat) for move in moves}
        if winning := [move for move, after in boards.items() if cls.winner(after)]:
            return winning
        safe = [move for move, after in boards.items() if not cls._can_win(after, other(seat))]
        return safe or moves

    @classmethod
    def _can_win(cls, board: str, seat: str) -> bool:
        moves = cls.legal_moves(board)
        return any(cls.winner(cls.place(board, move, seat)) for move in moves)

    @staticmethod
    def show(board: str) -> str:
        return "\n".join(board[row * COLUMNS : (row + 1) * COLUMNS] for row in range(ROWS))
