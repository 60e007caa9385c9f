"""Generates solvable Sokoban levels by playing backwards, or reads levels from files.

A hash of its room, walls and targets, assigns a generated level to training or to evaluation, so no
seed can leak a held-out room into training. Playing backwards follows Racanière et al. 2017
(Imagination-Augmented Agents), as does gym-sokoban. Level files have Boxoban's format
(https://github.com/google-deepmind/boxoban-levels): a line ``; name``, then the rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Final

import numpy as np

from broker.errors import ConfigError, DataError
from envhub.envs.games.sokoban_board import (
    XSB,
    SokobanLevel,
    SokobanRoom,
    cells_of,
    push_distances,
    reachable,
)
from envhub.envs.games.sokoban_solver import solve

HELD_OUT_SHARE: Final = 4  # one room in this many is held out
MAX_HELD_OUT: Final = 512
MAX_DRAWS: Final = 20_000
# rows and columns of a level from a file: there are 36 digits for those within the outer walls
MAX_SIDE: Final = 38
WALL_SHARE: Final = 0.2  # of the cells inside the outer walls


def is_held_out(room: SokobanRoom) -> bool:
    """Return whether the room belongs to evaluation."""
    cells = room.width * room.height
    data = b"".join(bits.to_bytes(cells // 8 + 1, "little") for bits in (room.floor, room.targets))
    return hashlib.blake2b(data, digest_size=1).digest()[0] % HELD_OUT_SHARE == 0


@lru_cache(maxsize=8192)
def train_level(
    size: int, boxes: int, pulls: int, max_solution: int | None, seed: int, task_index: int
) -> SokobanLevel:
    """Return the level of a training task, never in a held-out room.

    Args:
        size: rows and columns, including the outer walls.
        boxes: how many.
        pulls: steps played backwards from the solved position; the hardest position on the way is
            taken.
        max_solution: most moves of a shortest solution; None: any.

    Raises:
        ConfigError: if levels of this kind are too rare.
    """
    return next(
        _draw_levels(size, boxes, pulls, max_solution, [seed, task_index, 0], held_out=False)
    )


@lru_cache(maxsize=16)
def held_out_levels(
    size: int, boxes: int, pulls: int, max_solution: int | None
) -> tuple[SokobanLevel, ...]:
    """Return up to ``MAX_HELD_OUT`` different held-out levels, always the same."""
    levels: dict[SokobanLevel, None] = {}
    try:
        for level in _draw_levels(size, boxes, pulls, max_solution, [0, 0, 1], held_out=True):
            levels[level] = None
            if len(levels) == MAX_HELD_OUT:
                break
    except ConfigError:
        if not levels:
            raise
    return tuple(levels)


def _draw_levels(
    size: int, boxes: int, pulls: int, max_solution: int | None, seed: list[int], *, held_out: bool
) -> Iterator[SokobanLevel]:
    rng = np.random.default_rng(seed)
    for _ in range(MAX_DRAWS):
        room = _draw_room(size, boxes, rng)
        if room is None or is_held_out(room) is not held_out:
            continue
        level = _play_backwards(room, pulls, rng)
        if level is None:
            continue
        if max_solution is not None:
            solution = solve(room, level.player, level.boxes)
            if solution is None or len(solution) > max_solution:
                continue
        yield level
    raise ConfigError(
        "boxes", boxes, f"too few levels of {size}x{size} cells with {boxes} boxes and these limits"
    )


def _draw_room(size: int, boxes: int, rng: np.random.Generator) -> SokobanRoom | None:
    """Return a connected room with random walls and targets, None if it is too small."""
    inside = (rng.random((size - 2) ** 2) >= WALL_SHARE).nonzero()[0].tolist()
    cells = [(number // (size - 2) + 1) * size + number % (size - 2) + 1 for number in inside]
    if not cells:
        return None
    open_room = SokobanRoom(size, size, sum(1 << cell for cell in cells), 0)
    floor = reachable(open_room, 0, cells[int(rng.integers(len(cells)))])
    if floor.bit_count() < (size - 2) ** 2 // 2 or floor.bit_count() < 2 * boxes + 1:
        return None
    targets = rng.choice(cells_of(floor), size=boxes, replace=False)
    return SokobanRoom(size, size, floor, sum(1 << int(cell) for cell in targets))


def _play_backwards(room: SokobanRoom, pulls: int, rng: np.random.Generator) -> SokobanLevel | None:
    """Pull boxes off their targets at random; return the farthest position with none on one."""
    boxes = room.targets
    distances = push_distances(room)
    cells = cells_of(room.floor & ~boxes)
    player = cells[int(rng.integers(len(cells)))]
    best = None
    farthest = 0
    for choice in rng.random(pulls).tolist():
        reach = reachable(room, boxes, player)
        possible = [  # the player stands next to the box and steps back; the box follows
            (box, step)
            for box in cells_of(boxes)
            for step in room.steps
            if reach >> box + step & 1 and reach >> box + 2 * step & 1
        ]
        if not possible:
            break
        box, step = possible[int(choice * len(possible))]
        boxes ^= 1 << box | 1 << box + step
        player = box + 2 * step
        if boxes & room.targets:
            continue
        distance = sum(distances[cell] for cell in cells_of(boxes))
        if distance > farthest:
            best = (player, boxes)
            farthest = distance
    if best is None:
        return None
    # any cell that it can walk to is as good
    cells = cells_of(reachable(room, best[1], best[0]))
    return SokobanLevel(room, best[1], cells[int(rng.integers(len(cells)))])


def level_files(path: str) -> list[str]:
    """Return the file itself, or every ``.txt`` file of a folder by name.

    Raises:
        ConfigError: if there is none.
    """
    if Path(path).is_file():
        return [path]
    files = sorted(str(file) for file in Path(path).glob("*.txt"))
    if not files:
        raise ConfigError("path", path, "a file of levels, or a folder with .txt files of them")
    return files


@lru_cache(maxsize=64)
def read_levels(path: str) -> tuple[SokobanLevel, ...]:
    """Return every level of a file, in order.

    Raises:
        DataError: if a level is malformed; names the line.
        ConfigError: if the file has no levels or is not a text.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("path", path, f"a readable text file of levels: {error}") from None
    levels = []
    begin = 0
    for number, line in enumerate([*lines, ";"]):
        if line.startswith(";") or not line.strip():
            if number > begin:
                levels.append(_parse_level(path, begin + 1, lines[begin:number]))
            begin = number + 1
    if not levels:
        raise ConfigError("path", path, "the file holds no levels")
    return tuple(levels)


def _parse_level(path: str, first: int, rows: list[str]) -> SokobanLevel:
    """Return one level; ``first`` is the line of its first row."""
    width = len(rows[0])
    text = "".join(rows)
    if max(width, len(rows)) > MAX_SIDE:
        raise DataError(
            path, first, f"a level of {width}x{len(rows)} cells; at most {MAX_SIDE} on a side"
        )
    for number, row in enumerate(rows, start=first):
        if len(row) != width:
            raise DataError(path, number, f"a row of {len(row)} characters in a level of {width}")
        if strange := set(row) - set(XSB):
            raise DataError(
                path, number, f"{min(strange)!r} is none of {', '.join(map(repr, XSB))}"
            )
        if row[0] + row[-1] != "##" or (
            number in (first, first + len(rows) - 1) and row.strip("#")
        ):
            raise DataError(path, number, "the outermost cells of a level are walls, #")
    players = text.count("@") + text.count("+")
    boxes, targets = (_cell_bits(text, characters) for characters in ("$*", ".+*"))
    if players != 1:
        raise DataError(path, first, f"a level with {players} players (@ or +) instead of one")
    count = boxes.bit_count()
    goals = targets.bit_count()
    if count != goals or not boxes:
        raise DataError(
            path, first, f"a level with {count} boxes and {goals} targets, which must be as many"
        )
    if boxes == targets:
        raise DataError(path, first, "a level that is solved already")
    room = SokobanRoom(width, len(rows), _cell_bits(text, XSB[1:]), targets)
    return SokobanLevel(room, boxes, max(text.find("@"), text.find("+")))


def _cell_bits(text: str, characters: str) -> int:
    return sum(1 << cell for cell, character in enumerate(text) if character in characters)
