"""A Sokoban level as sets of cells, each set one integer with a bit for each cell; what one move does.

Cells are numbered row by row. The outermost ring of a board is wall, so no move leaves it and none wraps around a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

LETTERS: Final = "LDRU"
WALL, FLOOR, TARGET, BOX_ON_TARGET, BOX, PLAYER, PLAYER_ON_TARGET = range(7)  # gym-sokoban's numbers
XSB: Final = "# .*$@+"  # the characters of level files, in that order


@dataclass(frozen=True)
class SokobanRoom:
    """What never moves."""

    width: int
    height: int
    floor: int  # every cell that is no wall, targets included
    targets: int

    @property
    def steps(self) -> tuple[int, int, int, int]:
        """By how much each of ``LETTERS`` changes the number of a cell."""
        return (-1, self.width, 1, -self.width)


@dataclass(frozen=True)
class SokobanLevel:
    """Where everything starts."""

    room: SokobanRoom
    boxes: int
    player: int  # the number of a cell


def move(room: SokobanRoom, player: int, boxes: int, direction: int) -> tuple[int, int]:
    """(player, boxes) after a step in the direction ``LETTERS[direction]``, a push where a box is; the same where
    neither is possible.
    """
    step = room.steps[direction]
    there = player + step
    if not room.floor >> there & 1:
        return player, boxes
    if boxes >> there & 1:
        beyond = there + step
        if not room.floor >> beyond & 1 or boxes >> beyond & 1:
            return player, boxes
        boxes ^= 1 << there | 1 << beyond
    return there, boxes


def spread(room: SokobanRoom, free: int, start: int) -> list[int]:
    """The cells that can be walked to over ``free`` ones: those 0 steps away from cell ``start``, those 1 step away,
    …
    """
    frontier = seen = 1 << start
    layers = []
    while frontier:
        layers.append(frontier)
        near = frontier << 1 | frontier >> 1 | frontier << room.width | frontier >> room.width
        frontier = near & free & ~seen
        seen |= frontier
    return layers


def reachable(room: SokobanRoom, boxes: int, player: int) -> int:
    """Where the player can walk without a push, its own cell included."""
    cells = 0
    for layer in spread(room, room.floor & ~boxes, player):
        cells |= layer
    return cells


def cells_of(bits: int) -> list[int]:
    """The numbers of the cells of a set, ascending."""
    found = []
    while bits:
        low = bits & -bits
        found.append(low.bit_length() - 1)
        bits ^= low
    return found


@lru_cache(maxsize=4096)
def push_distances(room: SokobanRoom) -> dict[int, int]:
    """Fewest pushes from a cell to the nearest target for a box that is alone; a box on a cell that is absent is
    lost.
    """
    found = dict.fromkeys(cells_of(room.targets), 0)
    frontier = list(found)
    while frontier:
        following = []
        for cell in frontier:
            for step in room.steps:
                before, player = cell - step, cell - 2 * step
                if room.floor >> before & 1 and room.floor >> player & 1 and before not in found:
                    found[before] = found[cell] + 1
                    following.append(before)
        frontier = following
    return found


@lru_cache(maxsize=16384)  # the episodes of a group see the same states again and again
def draw(room: SokobanRoom, player: int, boxes: int, characters: str, border: bool) -> str:
    """The state as text, one row a line.

    Args:
        characters: one for each of wall, floor, target, box on target, box, player, player on target.
        border: with the outermost ring, which is wall everywhere.
    """
    cells = [characters[kind] for kind in kinds(room, player, boxes)]
    edge = 0 if border else 1
    rows = range(edge, room.height - edge)
    return "\n".join("".join(cells[row * room.width + edge : (row + 1) * room.width - edge]) for row in rows)


def kinds(room: SokobanRoom, player: int, boxes: int) -> list[int]:
    """What is on each cell, by gym-sokoban's numbers."""
    found = []
    for cell in range(room.width * room.height):
        target = room.targets >> cell & 1
        if not room.floor >> cell & 1:
            found.append(WALL)
        elif boxes >> cell & 1:
            found.append(BOX_ON_TARGET if target else BOX)
        elif cell == player:
            found.append(PLAYER_ON_TARGET if target else PLAYER)
        else:
            found.append(TARGET if target else FLOOR)
    return found
