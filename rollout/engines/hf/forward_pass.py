"""Lays out one forward pass: which rows belong to which sequence, and what each of them sees.

Adjacent slots with equally many new tokens are attended to in one call (a *block*).
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rollout.engines.hf.mask_rule import MaskRule


class Segment(NamedTuple):
    """The new tokens of one sequence: ``new`` tokens after the ``start`` tokens that its slot
    already holds.
    """

    slot: int
    start: int
    new: int


@dataclass(frozen=True, slots=True)
class SegmentBlock:
    """Segments in adjacent slots with equally many new tokens.

    Attributes:
        row: its first row in the pass.
        segment: number of its first segment in the pass.
        slot: first slot.
        size: number of segments.
        new: new tokens of each.
        starts: tokens that each slot held before; all equal unless ``new`` is 1.
    """

    row: int
    segment: int
    slot: int
    size: int
    new: int
    starts: tuple[int, ...]

    @property
    def rows(self) -> slice:
        return slice(self.row, self.row + self.size * self.new)

    @property
    def length(self) -> int:
        """Number of tokens in its longest slot after this pass."""
        return max(self.starts) + self.new


def join_segments(segments: Sequence[Segment]) -> list[SegmentBlock]:
    """Join segments, ordered by slot, into as few blocks as possible."""
    blocks: list[SegmentBlock] = []
    row = 0
    groups = itertools.groupby(
        enumerate(segments),
        lambda item: (item[1].slot - item[0], item[1].new, item[1].new > 1 and item[1].start),
    )
    for _, group in groups:
        numbers, members = zip(*group, strict=True)
        first = members[0]
        starts = tuple(segment.start for segment in members)
        blocks.append(
            SegmentBlock(
                row,
                numbers[0],
                first.slot,
                size=len(members),
                new=first.new,
                starts=starts,
            )
        )
        row += len(members) * first.new
    return blocks


@dataclass(frozen=True, slots=True)
class StateGroup:
    """Sequences that a layer with states computes as one batch.

    Attributes:
        rows: their rows in the pass; a slice where they are adjacent.
        slots: their slots, likewise.
        size: number of sequences.
        start: 0 if they begin, so that their slots' states do not count.
    """

    rows: Tensor | slice
    slots: Tensor | slice
    size: int
    start: int


class PassLayout(ABC):
    """What attention asks of a forward pass; index and masks are built once and shared by all
    layers.

    Attributes:
        blocks: what is attended to in one call each.
        max_context: tokens that a slot has room for.
    """

    def __init__(self, blocks: list[SegmentBlock], max_context: int, device: torch.device) -> None:
        self.blocks = blocks
        self.max_context = max_context
        self.device = device
        self._index: dict[int, Tensor] = {}
        self._masks: dict[tuple[int, int, MaskRule | None, torch.dtype], Tensor | None] = {}

    @property
    @abstractmethod
    def num_rows(self) -> int:
        """Number of new tokens, of all sequences."""

    @abstractmethod
    def positions(self) -> Tensor:
        """Return each row's position in its sequence, shape (1, rows)."""

    def index(self, num_heads: int) -> Tensor:
        """Return the cache row of each key, (rows * heads,), in a cache of (slots * heads *
        max_context + 1, head_dim).
        """
        if num_heads not in self._index:
            self._index[num_heads] = self._make_index(num_heads)
        return self._index[num_heads]

    def mask(
        self, block: SegmentBlock, groups: int, rule: MaskRule | None, dtype: torch.dtype
    ) -> Tensor | None:
        """Return an additive mask for (size, heads, groups * new, length); None if every row sees
        everything.

        Args:
            rule: what the layer lets a token see; None: all earlier ones.
        """
        if rule is not None and rule.reach is not None and block.length <= rule.reach:
            rule = None
        key = (block.row, groups, rule, dtype)
        if key not in self._masks:
            self._masks[key] = self._make_mask(block, groups, rule, dtype)
        return self._masks[key]

    def read(self, cache: Tensor, block: SegmentBlock) -> Tensor:
        """Return a block's part of a layer's keys or values, (size, KV heads, length, head size)."""
        stride = (
            cache.stride()
        )  # one call where indexing makes two: there are thousands in a second
        shape = (block.size, cache.shape[1], block.length, cache.shape[3])
        return cache.as_strided(shape, stride, block.slot * stride[0])

    @abstractmethod
    def _make_index(self, num_heads: int) -> Tensor: ...

    @abstractmethod
    def _make_mask(
        self, block: SegmentBlock, groups: int, rule: MaskRule | None, dtype: torch.dtype
    ) -> Tensor | None: ...

    def _additive(
        self, query: Tensor, length: int, rule: MaskRule | None, dtype: torch.dtype
    ) -> Tensor:
        """Return what is added to the scores of ``length`` keys for queries at these positions, (…,
        length).
        """
        keys = torch.arange(length, device=self.device)
        hidden = keys > query[..., None] if rule is None else ~rule.visible(query[..., None], keys)
        return torch.zeros(hidden.shape, dtype=dtype, device=self.device).masked_fill_(
            hidden, float("-inf")
        )


class ForwardPass(PassLayout):
    """Layout of one forward pass over any segments.

    Args:
        segments: ordered by slot, which is the order of the rows.

    Attributes:
        row_positions: each row's position in its sequence, (rows,) int64.
    """

    def __init__(self, segments: Sequence[Segment], max_context: int, device: torch.device) -> None:
        super().__init__(join_segments(segments), max_context, device)
        self.segments = segments
        self._groups: dict[bool, list[StateGroup]] = {}
        self._decoding: dict[tuple[MaskRule | None, torch.dtype], Tensor] = {}
        new = np.array([s.new for s in segments], dtype=np.int64)
        starts = np.array([s.start for s in segments], dtype=np.int64)
        ends = np.cumsum(new)
        self._ends = ends
        self.row_positions = np.repeat(starts - ends + new, new) + np.arange(
            int(ends[-1]), dtype=np.int64
        )
        self._slot = np.repeat(np.array([s.slot for s in segments], dtype=np.int64), new)

    @property
    def num_rows(self) -> int:
        return len(self.row_positions)

    def positions(self) -> Tensor:
        return torch.from_numpy(self.row_positions)[None].to(self.device)

    def state_groups(self, *, singly: bool = False) -> list[StateGroup]:
        """Return the sequences of this pass as layers with states compute them, one batch after
        another.

        Args:
            singly: a layer goes on from a state by one token at a time.
        """
        if singly not in self._groups:
            self._groups[singly] = self._group_sequences(singly)
        return self._groups[singly]

    def _group_sequences(self, singly: bool) -> list[StateGroup]:
        decoding = [
            n for n, segment in enumerate(self.segments) if segment.new == 1 and segment.start
        ]
        groups = []
        if decoding:
            slots = np.array([self.segments[n].slot for n in decoding])
            groups.append(
                StateGroup(
                    self._indices(self._ends[decoding] - 1), self._indices(slots), len(decoding), 1
                )
            )
        for segment, end in zip(self.segments, self._ends.tolist(), strict=True):
            if segment.new == 1 and segment.start:
                continue
            slot = slice(segment.slot, segment.slot + 1)
            first = end - segment.new
            step = 1 if singly and segment.start else segment.new
            for row in range(first, end, step):
                groups.append(StateGroup(slice(row, row + step), slot, 1, segment.start))
        return groups

    def _indices(self, values: npt.NDArray[np.int64]) -> Tensor | slice:
        if len(values) == values[-1] - values[0] + 1:  # ascending
            return slice(int(values[0]), int(values[-1]) + 1)
        return torch.from_numpy(values).to(self.device)

    def _make_index(self, num_heads: int) -> Tensor:
        flat = (
            self._slot[:, None] * num_heads + np.arange(num_heads)
        ) * self.max_context + self.row_positions[:, None]
        return torch.from_numpy(flat.reshape(-1)).to(self.device)

    def _make_mask(
        self, block: SegmentBlock, groups: int, rule: MaskRule | None, dtype: torch.dtype
    ) -> Tensor | None:
        if block.new == 1:
            if rule is None and len(set(block.starts)) == 1:
                return None
            every = self._decoding_mask(rule, dtype)[
                block.segment : block.segment + block.size, :, :, : block.length
            ]
            return every.expand(-1, -1, groups, -1)
        starts = torch.tensor(block.starts[:1], device=self.device)
        query = starts[:, None] + torch.arange(block.new, device=self.device)  # (1, new): positions
        return self._additive(query, block.length, rule, dtype).repeat(1, groups, 1)[:, None]

    def _decoding_mask(self, rule: MaskRule | None, dtype: torch.dtype) -> Tensor:
        """Return the mask of all segments with one new token, (segments, 1, 1, longest); the
        others' is not read.
        """
        if (rule, dtype) not in self._decoding:
            longest = max(block.length for block in self.blocks if block.new == 1)
            starts = torch.tensor([segment.start for segment in self.segments], device=self.device)
            self._decoding[rule, dtype] = self._additive(
                starts[:, None, None], longest, rule, dtype
            )
        return self._decoding[rule, dtype]
