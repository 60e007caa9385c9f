"""Generates maps for the frozen lake: solvable, seeded, and split into training and held-out maps.

A hash of the map decides its split, so no seed can leak a held-out map into training. A map is a
tuple of rows of ``S`` start, ``F`` frozen, ``H`` hole, ``G`` goal, as gymnasium's ``desc``.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator
from functools import lru_cache
from typing import Final

import numpy as np

from broker.errors import ConfigError

Map = tuple[str, ...]

LETTERS: Final = "LDRU"  # index = gymnasium's action number
MOVES: Final = ((0, -1), (1, 0), (0, 1), (-1, 0))  # (row, column) of each
HELD_OUT_SHARE: Final = 4  # one map in this many is held out
MAX_HELD_OUT: Final = 512
DRAWS_AT_A_TIME: Final = 16
MAX_DRAWS: Final = 40_000


def is_held_out(lake: Map) -> bool:
    """Return whether the map belongs to evaluation."""
    return _hashes_to_held_out("".join(lake).encode())


def _hashes_to_held_out(cells: bytes) -> bool:
    return hashlib.blake2b(cells, digest_size=1).digest()[0] % HELD_OUT_SHARE == 0


@lru_cache(maxsize=4096)
def distances(lake: Map) -> tuple[int, ...]:
    """Return the fewest moves to the goal from each cell, row by row; -1 if there is no way."""
    size = len(lake)
    steps = [-1] * (size * size)
    goal = "".join(lake).index("G")
    steps[goal] = 0
    frontier = deque([goal])
    while frontier:
        cell = frontier.popleft()
        row, column = divmod(cell, size)
        for down, right in MOVES:
            r = row + down
            c = column + right
            if 0 <= r < size and 0 <= c < size and lake[r][c] != "H" and steps[r * size + c] < 0:
                steps[r * size + c] = steps[cell] + 1
                frontier.append(r * size + c)
    return tuple(steps)


def best_moves(lake: Map, cell: int) -> list[str]:
    """Return the letters that start a shortest way to the goal on firm ice, if there is one."""
    size = len(lake)
    steps = distances(lake)
    row, column = divmod(cell, size)
    letters = []
    for letter, (down, right) in zip(LETTERS, MOVES, strict=True):
        r = row + down
        c = column + right
        if 0 <= r < size and 0 <= c < size and 0 <= steps[r * size + c] < steps[cell]:
            letters.append(letter)
    return letters


@lru_cache(maxsize=8192)
def train_map(size: int, hole_probability: float, seed: int, task_index: int) -> Map:
    """Return the map of a training task, never a held-out one.

    Raises:
        ConfigError: if solvable maps of this kind are too rare.
    """
    return next(_draw_maps(size, hole_probability, [seed, task_index, 0], held_out=False))


@lru_cache(maxsize=16)
def held_out_maps(size: int, hole_probability: float) -> tuple[Map, ...]:
    """Return up to ``MAX_HELD_OUT`` different held-out maps, always the same."""
    maps: dict[Map, None] = {}
    try:
        for lake in _draw_maps(size, hole_probability, [0, 0, 1], held_out=True):
            maps[lake] = None
            if len(maps) == MAX_HELD_OUT:
                break
    except ConfigError:
        if not maps:
            raise
    return tuple(maps)


def _draw_maps(
    size: int, hole_probability: float, seed: list[int], *, held_out: bool
) -> Iterator[Map]:
    """Yield solvable maps of one split, from ``MAX_DRAWS`` draws at most."""
    rng = np.random.default_rng(seed)
    for _ in range(MAX_DRAWS // DRAWS_AT_A_TIME):
        is_hole = rng.random((DRAWS_AT_A_TIME, size, size)) < hole_probability
        cell_codes = np.where(is_hole, ord("H"), ord("F")).astype(np.uint8)
        cell_codes[:, 0, 0] = ord("S")
        cell_codes[:, -1, -1] = ord("G")
        for cells in map(bytes, cell_codes.reshape(DRAWS_AT_A_TIME, -1)):
            if _hashes_to_held_out(cells) is held_out:
                lake = tuple(
                    cells[start : start + size].decode() for start in range(0, size * size, size)
                )
                if distances(lake)[0] > 0:
                    yield lake
    raise ConfigError(
        "hole_probability", hole_probability, f"too few solvable {size}x{size} maps at this value"
    )
