"""Represents a Sokoban level as sets of cells, each an integer with a bit per cell, and applies
moves.

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
    """Return (player, boxes) after a step or push in the direction ``LETTERS[direction]``,
    unchanged if impossible.
    """
    step = room.steps[direction]
    target = player + step
    if not room.floor >> target & 1:
        return player, boxes
    if boxes >> target & 1:
        beyond = target + step
        if not room.floor >> beyond & 1 or boxes >> beyond & 1:
            return player, boxes
        boxes ^= 1 << target | 1 << beyond
    return target, boxes


def spread(room: SokobanRoom, free: int, start: int) -> list[int]:
    """Return the cells reachable over ``free`` ones: those 0 steps away from cell ``start``, those
    1 step away, …
    """
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
    cells = []
    while bits:
        low = bits & -bits
        cells.append(low.bit_length() - 1)
        bits ^= low
    return cells


@lru_cache(maxsize=4096)
def push_distances(room: SokobanRoom) -> dict[int, int]:
    """Return the fewest pushes from a cell to the nearest target for a lone box; on an absent cell
    it is lost.
    """
    distance_of = dict.fromkeys(cells_of(room.targets), 0)
    frontier = list(distance_of)
    while frontier:
        following = []
        for cell in frontier:
            for step in room.steps:
                previous = cell - step
                player = cell - 2 * step
                if (
                    room.floor >> previous & 1
                    and room.floor >> player & 1
                    and previous not in distance_of
                ):
                    distance_of[previous] = distance_of[cell] + 1
                    following.append(previous)
        frontier = following
    return distance_of


@lru_cache(maxsize=16384)  # the episodes of a group see the same states many times
def draw(room: SokobanRoom, player: int, boxes: int, characters: str, border: bool) -> str:
    """Return the state as text, one row per line.

    Args:
        characters: one for each of wall, floor, target, box on target, box, player, player on
            target.
        border: with the outermost ring, which is all wall.
    """
    cells = [characters[kind] for kind in kinds(room, player, boxes)]
    edge = 0 if border else 1
    rows = range(edge, room.height - edge)
    return "\n".join(
        "".join(cells[row * room.width + edge : (row + 1) * room.width - edge]) for row in rows
    )


def kinds(room: SokobanRoom, player: int, boxes: int) -> list[int]:
    """Return what is on each cell, as gym-sokoban's numbers."""
    cell_kinds = []
    for cell in range(room.width * room.height):
        target = room.targets >> cell & 1
        if not room.floor >> cell & 1:
            cell_kinds.append(WALL)
        elif boxes >> cell & 1:
            cell_kinds.append(BOX_ON_TARGET if target else BOX)
        elif cell == player:
            cell_kinds.append(PLAYER_ON_TARGET if target else PLAYER)
        else:
            cell_kinds.append(TARGET if target else FLOOR)
    return cell_kinds
