"""Knows a rank's slices of tensors in Hugging Face's shapes, and gathers such tensors on rank 0."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from learner.backends.megatron.grid import ProcessGroups, RankGrid
from learner.backends.megatron.mapping import TensorPart, share_size
from learner.backends.parts.slices import Slice


class TensorExchange:
    """What this rank holds of some tensors.

    Attributes:
        shapes: of all of them by Hugging Face's names, on the meta device.
    """

    def __init__(
        self,
        grid: RankGrid,
        groups: ProcessGroups,
        parts: Sequence[TensorPart],
        shapes: Mapping[str, Tensor],
        device: torch.device,
    ) -> None:
        self._grid = grid
        self._groups = groups
        self._device = device
        self.shapes = dict(shapes)
        self.own = [part for part in parts if part.stage == grid.stage]
        self._first = {part.name: part for part in parts if not part.copy}
        # The stages that have a tensor: a tied embedding is at both ends.
        self._stages: dict[str, list[int]] = {}
        for part in parts:
            self._stages.setdefault(part.name, []).append(part.stage)

    def slices(self, holders: Mapping[str, Tensor]) -> Iterator[Slice]:
        """Yield this rank's slices.

        Args:
            holders: this rank's parameters, tensors of their shapes, or a scalar for each, by
                Megatron's names.
        """
        grid = self._grid
        for part in self.own:
            holder = holders[part.holder].detach()
            stages = self._stages[part.name]
            place = grid.copy + grid.dp * stages.index(grid.stage)
            count = grid.dp * len(stages)
            if holder.ndim and part.dim is not None and grid.tp > 1:
                yield _share_slice(
                    part, holder, tuple(self.shapes[part.name].shape), grid, (place, count)
                )
                continue
            among = (place * grid.tp + grid.share, count * grid.tp)
            if holder.ndim:
                shape = tuple(self.shapes[part.name].shape)
                yield Slice(part.name, shape, 0, part.view(holder), among=among)
            else:
                yield Slice(part.name, (), 0, holder, among=among)

    @torch.no_grad()
    def gather(self, name: str, holders: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor | None:
        """Return a whole tensor on rank 0, None elsewhere.

        Args:
            holders: this rank's parameters, or tensors of their shapes and ``dtype``, by Megatron's
                names.
        """
        part = self._first[name]
        grid = self._grid
        source = grid.at(0, 0, part.stage)
        tensor = None
        if grid.stage == part.stage and grid.copy == 0:
            tensor = self._whole(part, holders[part.holder])
        if source == 0:
            return tensor if grid.rank == 0 else None
        if grid.rank == source:
            assert tensor is not None
            dist.send(tensor, 0)
        if grid.rank != 0:
            return None
        tensor = torch.empty(self.shapes[name].shape, dtype=dtype, device=self._device)
        dist.recv(tensor, source)
        return tensor

    def _whole(self, part: TensorPart, holder: Tensor) -> Tensor:
        shape = list(self.shapes[part.name].shape)
        length = shape[part.dim] if part.dim is not None else 0
        if part.dim is not None:
            shape[part.dim] = share_size(length, self._grid.tp)
        # While the model is loaded its parameters are in host memory.
        share = part.view(holder.detach()).reshape(shape).to(self._device).contiguous()
        if part.dim is None or self._grid.tp == 1:
            return share
        shares = [torch.empty_like(share) for _ in range(self._grid.tp)]
        dist.all_gather(shares, share, group=self._groups.tp)
        return torch.cat(shares, part.dim).narrow(part.dim, 0, length).contiguous()


def _share_slice(
    part: TensorPart, holder: Tensor, shape: tuple[int, ...], grid: RankGrid, among: tuple[int, int]
) -> Slice:
    """Return this rank's rows or columns of a divided tensor, without padding."""
    assert part.dim is not None
    length = shape[part.dim]
    view = part.view(holder)
    size = share_size(length, grid.tp)
    first = min(grid.share * size, length)
    if part.dim == 1:
        return Slice(part.name, shape, first, view[:, : length - first], among=among, block=True)
    elements = view
    # Heads in groups have another shape than the tensor, and no padding.
    if len(view) == size:
        elements = view[: length - first]
    return Slice(part.name, shape, first * prod(shape[1:]), elements, among=among)
