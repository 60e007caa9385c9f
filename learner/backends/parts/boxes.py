"""Elements of a tensor as boxes of a matrix: flat ranges and blocks of columns; pure functions.

A tensor of several dimensions has a row for each index of the first, any other tensor is one row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod


@dataclass(frozen=True)
class Box:
    """Rows ``top`` to ``bottom`` and columns ``left`` to ``right``."""

    top: int
    bottom: int
    left: int
    right: int

    @property
    def rows(self) -> int:
        return self.bottom - self.top

    @property
    def columns(self) -> int:
        return self.right - self.left

    @property
    def numel(self) -> int:
        return self.rows * self.columns

    def meet(self, box: Box) -> Box | None:
        """Return what two boxes have in common, None if that is nothing."""
        top = max(self.top, box.top)
        bottom = min(self.bottom, box.bottom)
        left = max(self.left, box.left)
        right = min(self.right, box.right)
        if top < bottom and left < right:
            return Box(top, bottom, left, right)
        return None

    def cut(self, numel: int) -> Iterator[Box]:
        """Yield boxes of at most ``numel`` elements: of whole rows, or of one row that has more."""
        rows = max(1, numel // max(1, self.columns))
        columns = min(self.columns, numel)
        for top in range(self.top, self.bottom, rows):
            for left in range(self.left, self.right, max(1, columns)):
                yield Box(top, min(top + rows, self.bottom), left, min(left + columns, self.right))


def matrix_of(shape: Sequence[int]) -> tuple[int, int]:
    """Return rows and columns of a tensor's matrix."""
    if len(shape) > 1:
        return shape[0], prod(shape[1:])
    return 1, prod(shape)


def boxes_between(start: int, stop: int, width: int) -> Iterator[Box]:
    """Yield a range of the flattened tensor in order: part of a row, whole rows, part of a row."""
    while start < stop:
        row, column = divmod(start, width)
        if column or stop - start < width:
            end = min(stop, (row + 1) * width)
            yield Box(row, row + 1, column, column + end - start)
        else:
            rows = (stop - start) // width
            end = start + rows * width
            yield Box(row, row + rows, 0, width)
        start = end


def stored_boxes(whole: Sequence[int], shape: Sequence[int], offsets: Sequence[int]) -> list[Box]:
    """Return which elements of a tensor an entry of a file has, in the order of its bytes.

    Args:
        whole: the tensor's shape.
        shape: the entry's.
        offsets: the place of its first element in the flattened tensor, or of a block in a matrix,
            row and column.

    Raises:
        ValueError: if that is not in the tensor, or a block of another kind.
    """
    rows, width = matrix_of(whole)
    if len(offsets) == 1:
        start = offsets[0]
        # A tensor without elements may have a width of 0.
        boxes = list(boxes_between(start, start + prod(shape), width)) if width else []
    elif len(offsets) == len(whole) == len(shape) == 2:
        top, left = offsets
        block = Box(top, top + shape[0], left, left + shape[1])
        boxes = [block] if block.numel else []
    else:
        raise ValueError(f"a slice of shape {list(shape)} at {list(offsets)} of {list(whole)}")
    for box in boxes:
        if not (0 <= box.top < box.bottom <= rows and 0 <= box.left < box.right <= width):
            raise ValueError(
                f"a slice of shape {list(shape)} at {list(offsets)} is outside {list(whole)}"
            )
    return boxes


def first_gap(boxes: Iterable[Box], rows: int, width: int) -> int | None:
    """Return the first element of a matrix, flattened, that is in no box; None if there is none."""
    waiting = sorted(boxes, key=lambda box: (-box.top, -box.left))
    edges = sorted({0, rows, *(edge for box in waiting for edge in (box.top, box.bottom))})
    active: list[Box] = []
    for top, _ in pairwise(edges):
        active = [box for box in active if box.bottom > top]
        while waiting and waiting[-1].top <= top:
            active.append(waiting.pop())
        at = 0
        for box in sorted(active, key=lambda box: box.left):
            if box.left > at:
                break
            at = max(at, box.right)
        if at < width:
            return top * width + at
    return None
