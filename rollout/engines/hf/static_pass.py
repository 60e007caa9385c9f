"""Lays out a pass in which every sequence reads one token, in shapes that few passes do not share.

The layout depends on tensors only, so that a CUDA graph of the pass holds for any sequences that
fit its shape. Numbers of rows and lengths are rounded up. Either row i is slot i, and idle slots
compute a token that nobody reads; or the slots of the running sequences are gathered, which copies
their keys and values, and pays where few of many slots run.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rollout.engines.hf.forward_pass import PassLayout, SegmentBlock
from rollout.engines.hf.mask_rule import MaskRule

SHORTEST: Final = 128  # length of the smallest shapes
GATHER_COST: Final = 3  # keys and values are read, written and read again
GATHER_BYTES: Final = 512 << 20  # of the copies of one layer, at most


class StaticShape(NamedTuple):
    """Shape of a static pass.

    Attributes:
        rows: number of rows.
        length: tokens of each slot that are read.
        gathers: the rows' slots are gathered; otherwise row i is slot i.
    """

    rows: int
    length: int
    gathers: bool

    @property
    def cost(self) -> int:
        """What attention reads and writes, in tokens."""
        return self.rows * self.length * (GATHER_COST if self.gathers else 1)

    def covers(self, slots: npt.NDArray[np.int64], length: int) -> bool:
        """Return whether sequences in these slots, none longer than ``length``, fit."""
        rows = len(slots) if self.gathers else int(slots.max()) + 1
        return rows <= self.rows and length <= self.length

    def __str__(self) -> str:
        kind = "gathered" if self.gathers else "in place"
        return f"{self.rows} rows of {self.length} tokens, {kind}"


def fitting_shapes(
    slots: npt.NDArray[np.int64], length: int, num_slots: int, max_context: int
) -> tuple[StaticShape, StaticShape]:
    """Return the smallest shapes for these slots: in place and gathered.

    Args:
        length: tokens of the longest sequence after the pass.
    """
    reach = rounded_up(length, SHORTEST, max_context)
    in_place = rounded_up(int(slots.max()) + 1, 1, num_slots)
    gathered = rounded_up(len(slots), 1, num_slots)
    return StaticShape(in_place, reach, False), StaticShape(gathered, reach, True)


def rounded_up(number: int, smallest: int, largest: int) -> int:
    """Return the next power of two, or three quarters of it if that suffices, between bounds."""
    power = 1 << max(0, number - 1).bit_length()
    size = power * 3 // 4 if power * 3 // 4 >= number and power >= 32 else power
    return min(max(size, smallest), largest)


def input_rows(
    shape: StaticShape,
    slots: npt.NDArray[np.int64],
    starts: npt.NDArray[np.int64],
    token_ids: npt.NDArray[np.int64],
    num_slots: int,
) -> npt.NDArray[np.int64]:
    """Return the inputs of a static pass, (4, rows) int64: token ids, positions, slots, and the rows
    of the sequences, whose number is shorter.

    An idle row reads token 0 at position 0, and has the slot ``num_slots``.
    """
    inputs = np.zeros((4, shape.rows), np.int64)
    inputs[2] = num_slots
    rows = np.arange(len(slots)) if shape.gathers else slots
    inputs[0, rows] = token_ids
    inputs[1, rows] = starts
    inputs[2, rows] = slots
    inputs[3, : len(rows)] = rows
    return inputs


class StaticPass(PassLayout):
    """Layout of a static pass; everything that attention asks for is computed on the device.

    Args:
        inputs: (4, rows) int64 on the device, see ``input_rows``.
    """

    def __init__(
        self, shape: StaticShape, inputs: Tensor, num_slots: int, max_context: int
    ) -> None:
        block = SegmentBlock(0, 0, 0, size=shape.rows, new=1, starts=(shape.length - 1,))
        super().__init__([block], max_context, inputs.device)
        self.shape = shape
        self.token_ids = inputs[0]
        self._positions = inputs[1]
        self._slots = inputs[2]
        self._num_slots = num_slots
        self._additives: dict[tuple[MaskRule | None, torch.dtype], Tensor] = {}

    @property
    def num_rows(self) -> int:
        return self.shape.rows

    def positions(self) -> Tensor:
        return self._positions[None]

    def read(self, cache: Tensor, block: SegmentBlock) -> Tensor:
        if not self.shape.gathers:
            return super().read(cache, block)
        slots = self._slots.clamp(max=self._num_slots - 1)
        return cache[:, :, : block.length].index_select(0, slots)

    def _make_index(self, num_heads: int) -> Tensor:
        heads = torch.arange(num_heads, device=self.device)
        flat = (self._slots[:, None] * num_heads + heads) * self.max_context
        flat = (flat + self._positions[:, None]).reshape(-1)
        # idle rows write to the cache's last row, which no slot has
        return flat.clamp(max=self._num_slots * num_heads * self.max_context)

    def _make_mask(
        self, block: SegmentBlock, groups: int, rule: MaskRule | None, dtype: torch.dtype
    ) -> Tensor:
        if (rule, dtype) not in self._additives:
            query = self._positions[:, None, None]
            self._additives[rule, dtype] = self._additive(query, block.length, rule, dtype)
        return self._additives[rule, dtype].expand(-1, -1, groups, -1)
