"""Represents Sokoban levels as sets of cells, integers with a bit per cell, and applies moves.

Cells are numbered row by row. The outermost ring of a board is wall, so no move leaves it or wraps
around a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

LETTERS: Final = "LDRU"
# gym-sokoban's numbers
WALL, FLOOR, TARGET, BOX_ON_TARGET, BOX, PLAYER, PLAYER_ON_TARGET = range(7)
XSB: Final = "# .*$@+"  # the characters of level files, in that order


@dataclass(frozen=True)
class SokobanRoom:
    """The fixed part of a level."""

    width: int
    height: int
    floor: int  # every cell that is not wall, including targets
    targets: int

    @property
    def steps(self) -> tuple[int, int, int, int]:
        """The change of a cell's number for each of ``LETTERS``."""
        return (-1, self.width, 1, -self.width)


@dataclass(frozen=True)
class SokobanLevel:
    """The start of a level."""

    room: SokobanRoom
    boxes: int
    player: int  # the number of a cell


def move(room: SokobanRoom, player: int, boxes: int, direction: int) -> tuple[int, int]:
    """Return (player, boxes) after a move towards ``LETTERS[direction]``, the same if it fails."""
    step = room.steps[direction]
    next_cell = player + step
    if not room.floor >> next_cell & 1:
        return player, boxes
    if boxes >> next_cell & 1:
        box_cell = next_cell + step
        if not room.floor >> box_cell & 1 or boxes >> box_cell & 1:
            return player, boxes
        boxes ^= 1 << next_cell | 1 << box_cell
    return next_cell, boxes


def spread(room: SokobanRoom, free: int, start: int) -> list[int]:
    """Return the cells reachable over ``free`` ones, by their number of steps from ``start``."""
    frontier = reached = 1 << start
    layers = []
    while frontier:
        layers.append(frontier)
        near = frontier << 1 | frontier >> 1 | frontier << room.width | frontier >> room.width
        frontier = near & free & ~reached
        reached |= frontier
    return layers


def reachable(room: SokobanRoom, boxes: int, player: int) -> int:
    """Return the cells that the player can reach without a push, including its own."""
    cells = 0
    for layer in spread(room, room.floor & ~boxes, player):
        cells |= layer
    return cells


def cells_of(bits: int) -> list[int]:
    """Return the numbers of a set's cells, ascending."""
    numbers = []
    while bits:
        low = bits & -bits
        numbers.append(low.bit_length() - 1)
        bits ^= low
    return numbers


@lru_cache(maxsize=4096)
def push_distances(room: SokobanRoom) -> dict[int, int]:
    """Return the fewest pushes from each cell to a target; on an absent cell a box is lost."""
    pushes = dict.fromkeys(cells_of(room.targets), 0)
    frontier = list(pushes)
    while frontier:
        following = []
        for cell in frontier:
            for step in room.steps:
                box_cell = cell - step
                player = cell - 2 * step
                if (
                    room.floor >> box_cell & 1
                    and room.floor >> player & 1
                    and box_cell not in pushes
                ):
                    pushes[box_cell] = pushes[cell] + 1
                    following.append(box_cell)
        frontier = following
    return pushes


@lru_cache(maxsize=16384)  # the episodes of a group see the same states many times
def draw(room: SokobanRoom, player: int, boxes: int, characters: str, border: bool) -> str:
    """Return the state as text, one row per line.

    Args:
        characters: one for each of wall, floor, target, box on target, box, player, player on
            target.
        border: with the outermost ring, which is all wall.
    """
    cells = [characters[kind] for kind in kinds(room, player, boxes)]
    edge = int(not border)
    rows = range(edge, room.height - edge)
    return "\n".join(
        "".join(cells[row * room.width + edge : (row + 1) * room.width - edge]) for row in rows
    )


def kinds(room: SokobanRoom, player: int, boxes: int) -> list[int]:
    """Return what is on each cell, as gym-sokoban's numbers."""
    numbers = []
    for cell in range(room.width * room.height):
        is_target = room.targets >> cell & 1
        if not room.floor >> cell & 1:
            numbers.append(WALL)
        elif boxes >> cell & 1:
            numbers.append(BOX_ON_TARGET if is_target else BOX)
        elif cell == player:
            numbers.append(PLAYER_ON_TARGET if is_target else PLAYER)
        else:
            numbers.append(TARGET if is_target else FLOOR)
    return numbers
