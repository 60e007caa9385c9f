"""Layout of packed rows: where their sequences are, and which of them are computed together.

Layers that mix the tokens of a sequence (attention, convolutions, recurrences) take the row's
sequences as the rows of small batches of similar length; all other layers see the row without
padding. A prefix that several sequences begin with, as a group with its prompt, is in the row once:
only the layers that mix tokens compute it for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from learner.algorithm.packing import Array, prefix_order

# Longest to shortest sequence of one batch, whose padding is computed in vain; a lower ratio would
# make more and smaller batches.
MAX_LENGTH_RATIO: Final = 1.25


class PackedRow:
    """Where the sequences of a row are.

    Not a tuple: torch.compile would inspect one and compile again for each layout.

    Attributes:
        shapes: for each call of the attention kernel, its number of sequences and the length of the
            longest.
        spread: (places,) int64, the row's token at each place of those calls; None: one to one.
        gather: (row,) int64, a place of each token.
    """

    def __init__(
        self, shapes: Sequence[tuple[int, int]], spread: Tensor | None, gather: Tensor | None
    ) -> None:
        self.shapes = tuple(shapes)
        self.spread = spread
        self.gather = gather

    def rows(self, states: Tensor) -> list[Tensor]:
        """(1, heads, row, width) to (sequences, heads, longest, width) for each call."""
        tokens = states[0] if self.spread is None else states[0].index_select(1, self.spread)
        parts = torch.split(tokens, [num * longest for num, longest in self.shapes], 1)
        shaped = zip(parts, self.shapes, strict=True)
        return [
            part.view(len(part), num, longest, -1).transpose(0, 1)
            for part, (num, longest) in shaped
        ]

    def flat(self, rows: Sequence[Tensor]) -> Tensor:
        """The inverse, to (row, heads, width)."""
        parts = [part.transpose(1, 2).flatten(0, 1) for part in rows]
        # torch.cat copies even a single part.
        tokens = parts[0] if len(parts) == 1 else torch.cat(parts)
        return tokens if self.gather is None else tokens.index_select(0, self.gather)


def pack_row(sequences: Sequence[Array], device: torch.device) -> PackedRow:
    """Group sequences of similar length.

    Args:
        sequences: the indices in the row of each one's tokens, (length,) int64; sequences may share
            tokens.
    """
    ordered = sorted(sequences, key=len)
    shapes: list[tuple[int, int]] = []
    spread: list[Array] = []
    while ordered:
        num = sum(len(sequence) <= MAX_LENGTH_RATIO * len(ordered[0]) for sequence in ordered)
        piece = ordered[:num]
        ordered = ordered[num:]
        longest = len(piece[-1])
        shapes.append((num, longest))
        # Places behind a sequence's end repeat its last token: no token sees them, and their
        # results are dropped.
        spread += [
            np.pad(sequence, (0, longest - len(sequence)), mode="edge") for sequence in piece
        ]
    places = np.concatenate(spread)
    # The first place of a token is never padding.
    _, gather = np.unique(places, return_index=True)
    if len(gather) == len(places) and bool((places[1:] > places[:-1]).all()):
        return PackedRow(shapes, None, None)
    return PackedRow(
        shapes, torch.from_numpy(places).to(device), torch.from_numpy(gather).to(device)
    )


@dataclass(frozen=True)
class SharedRow:
    """Sequences in one row, with a prefix that several begin with only once.

    Attributes:
        token_ids: (row,) int64.
        places: (row,) int64, each token's place in every sequence that it is in.
        indices: of each sequence, the indices in the row of its tokens, (length,) int64.
    """

    token_ids: Array
    places: Array
    indices: list[Array]

    @staticmethod
    def of(sequences: Sequence[Array]) -> SharedRow:
        """Lay sequences in a row; a causal model computes the same for a token whatever follows it.

        Args:
            sequences: token ids, (length,) each, all lengths above 0.
        """
        indices: list[Array] = [np.empty(0, np.int64)] * len(sequences)
        ids: list[Array] = []
        places: list[Array] = []
        previous = np.empty(0, np.int64)
        size = 0
        for number, shared in prefix_order(sequences):
            own = sequences[number][shared:]
            previous = np.concatenate([previous[:shared], np.arange(size, size + len(own))])
            indices[number] = previous
            size = size + len(own)
            ids.append(own)
            places.append(np.arange(shared, len(previous)))
        return SharedRow(np.concatenate(ids).astype(np.int64), np.concatenate(places), indices)
