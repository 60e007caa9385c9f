"""Solves Sokoban by A* over pushes, pruning blocks of four and cells where a box is lost.

The cost is the number of moves. With up to ``EXACT_BOXES`` boxes the solution is a shortest one;
with more, the estimate counts ``WEIGHT``-fold, which finds longer solutions much sooner.
``MAX_STATES`` bounds the time.
"""

from __future__ import annotations

import heapq
from functools import lru_cache
from typing import Final

from envhub.envs.games.sokoban_board import LETTERS, SokobanRoom, cells_of, push_distances, spread

EXACT_BOXES: Final = 2
WEIGHT: Final = 3
MAX_STATES: Final = 20_000

State = tuple[int, int]  # (player, boxes)
Push = tuple[State, int, int]  # (state before, cell of the box, direction)


@lru_cache(maxsize=16384)
def solve(room: SokobanRoom, player: int, boxes: int, max_states: int = MAX_STATES) -> str | None:
    """Return the letters that solve the state; None: no solution within ``max_states`` states."""
    weight = 1 if boxes.bit_count() <= EXACT_BOXES else WEIGHT
    start = (player, boxes)
    if (remaining := _estimate_pushes(room, boxes)) is None:
        return None
    cost = {start: 0}
    last_pushes = dict[State, Push]()
    queue = [(weight * remaining, 0, start)]
    closed: set[State] = set()
    while queue and len(closed) < max_states:
        _, _, state = heapq.heappop(queue)
        if state in closed:
            continue
        if state[1] == state[1] & room.targets:
            return _trace_moves(room, start, state, last_pushes)
        closed.add(state)
        for box, direction, walked in _possible_pushes(room, *state):
            step = room.steps[direction]
            following = (box, state[1] ^ (1 << box | 1 << box + step))
            total = cost[state] + walked + 1
            if total < cost.get(following, total + 1) and not _is_blocked(
                room, following[1], box + step
            ):
                ahead = _estimate_pushes(room, following[1])
                if ahead is not None:
                    cost[following] = total
                    last_pushes[following] = (state, box, direction)
                    # of equal estimates the deeper state comes first
                    heapq.heappush(queue, (total + weight * ahead, -total, following))
    return None


def _estimate_pushes(room: SokobanRoom, boxes: int) -> int | None:
    """Return the fewest pushes that are needed, None if a box is lost."""
    distances = push_distances(room)
    total = 0
    for cell in cells_of(boxes):
        if cell not in distances:
            return None
        total += distances[cell]
    return total


def _possible_pushes(room: SokobanRoom, player: int, boxes: int) -> list[tuple[int, int, int]]:
    """Return (cell of the box, direction, steps to walk before it) of every possible push."""
    free = room.floor & ~boxes
    layers = spread(room, free, player)
    pushes = []
    for box in cells_of(boxes):
        for direction, step in enumerate(room.steps):
            if free >> box + step & 1 and free >> box - step & 1:
                stand = 1 << box - step
                walked = next((far for far, layer in enumerate(layers) if layer & stand), None)
                if walked is not None:
                    pushes.append((box, direction, walked))
    return pushes


def _is_blocked(room: SokobanRoom, boxes: int, box: int) -> bool:
    """Return whether the pushed box is in a block of four that holds a box off its target."""
    for aside in (-1, 1):
        for away in (-room.width, room.width):
            block = 1 << box | 1 << box + aside | 1 << box + away | 1 << box + aside + away
            if not block & room.floor & ~boxes and block & boxes & ~room.targets:
                return True
    return False


def _trace_moves(
    room: SokobanRoom, start: State, end: State, last_pushes: dict[State, Push]
) -> str:
    """Return the letters from one state to another, including walks."""
    parts = []
    while end != start:
        previous, box, direction = last_pushes[end]
        stand = box - room.steps[direction]
        parts.append(_walk_letters(room, previous, stand) + LETTERS[direction])
        end = previous
    return "".join(reversed(parts))


def _walk_letters(room: SokobanRoom, state: State, goal: int) -> str:
    """Return a shortest walk to a cell, always the same of several."""
    letters = ""
    # backwards, so that every step is towards the goal
    layers = spread(room, room.floor & ~state[1], goal)
    cell = state[0]
    far = next(number for number, layer in enumerate(layers) if layer >> cell & 1)
    for layer in reversed(layers[:far]):
        direction = next(
            number for number, step in enumerate(room.steps) if layer >> cell + step & 1
        )
        cell += room.steps[direction]
        letters += LETTERS[direction]
    return letters
