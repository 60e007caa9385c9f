"""Turns the columns that the ranks of a layer hold into rows, ranges of the flattened tensor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from broker.weights.stripes.layout import ElementRun
from learner.backends.megatron.grid import RankGrid
from learner.backends.megatron.mapping import share_size
from learner.backends.parts.names import MODEL
from learner.backends.parts.slices import Slice
from learner.backends.sent_runs import SentRun


class RowExchange:
    """What a rank sends of its slices.

    Of a block, each copy of the model takes some rows, and its ranks exchange columns: each gets
    some of these rows whole. So at most a tensor's elements of one rank are on their way at a time.

    Args:
        group: ranks that divide a layer.
    """

    def __init__(self, grid: RankGrid, group: Any) -> None:
        self._grid = grid
        self._group = group

    def sent_runs(self, slices: Iterable[Slice]) -> Iterator[SentRun]:
        """Yield what this rank sends; the ranks of a layer read their runs together, in order."""
        grid = self._grid
        for piece in slices:
            if not piece.block:
                yield SentRun.of(piece, grid.rank, grid.size)
                continue
            own = piece.own(grid.rank, grid.size)
            width = piece.shape[1]
            rows = self._rows(own)
            top = own.start // width + sum(rows[: grid.share])
            run = ElementRun(piece.name.removeprefix(MODEL), top * width, rows[grid.share] * width)
            yield SentRun(run, partial(self._exchange, own))

    def _rows(self, own: Slice) -> list[int]:
        """Return how many of these rows each rank of the layer gets."""
        cuts = [len(own.tensor) * share // self._grid.tp for share in range(self._grid.tp + 1)]
        return [last - first for first, last in pairwise(cuts)]

    @torch.no_grad()
    def _exchange(self, own: Slice) -> Tensor:
        tp = self._grid.tp
        length = own.shape[1]
        columns = own.tensor.shape[1]
        size = share_size(length, tp)
        rows = self._rows(own)
        widths = [min(size, length - size * share) for share in range(tp)]
        num_rows = rows[self._grid.share]
        send_sizes = [count * columns for count in rows]
        receive_sizes = [width * num_rows for width in widths]
        arrived = own.tensor.new_empty(sum(receive_sizes))
        dist.all_to_all_single(
            arrived, own.tensor.reshape(-1), receive_sizes, send_sizes, group=self._group
        )
        blocks = zip(torch.split(arrived, receive_sizes), widths, strict=True)
        return torch.cat([block.view(num_rows, width) for block, width in blocks], 1).flatten()
