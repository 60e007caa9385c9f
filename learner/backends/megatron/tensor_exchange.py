"""Gathers tensors in Hugging Face's shapes on rank 0 and deals them out from there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from learner.backends.megatron.grid import ProcessGroups, RankGrid
from learner.backends.megatron.mapping import TensorPart, share_size, take_share


class TensorExchange:
    """Collective operations; ``shapes`` are all tensors by Hugging Face's names, on the meta device."""

    def __init__(
        self,
        grid: RankGrid,
        groups: ProcessGroups,
        parts: Sequence[TensorPart],
        shapes: Mapping[str, Tensor],
        device: torch.device,
    ) -> None:
        self._grid, self._groups, self._device = grid, groups, device
        self.shapes = dict(shapes)
        self.own = [part for part in parts if part.stage == grid.stage]
        self._first = {part.name: part for part in parts if not part.copy}

    @torch.no_grad()
    def gather(self, name: str, holders: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor | None:
        """Return a whole tensor on rank 0, None elsewhere.

        Args:
            holders: this rank's parameters, or tensors of their shapes and ``dtype``, by Megatron's names.
        """
        part, grid = self._first[name], self._grid
        source, found = grid.at(0, 0, part.stage), None
        if grid.stage == part.stage and grid.copy == 0:
            found = self._whole(part, holders[part.holder])
        if source == 0:
            return found if grid.rank == 0 else None
        if grid.rank == source:
            assert found is not None
            dist.send(found, 0)
        if grid.rank != 0:
            return None
        found = torch.empty(self.shapes[name].shape, dtype=dtype, device=self._device)
        dist.recv(found, source)
        return found

    def _whole(self, part: TensorPart, holder: Tensor) -> Tensor:
        shape = list(self.shapes[part.name].shape)
        length = shape[part.dim] if part.dim is not None else 0
        if part.dim is not None:
            shape[part.dim] = share_size(length, self._grid.tp)
        share = part.view(holder.detach()).reshape(shape).to(self._device).contiguous()  # from host memory
        if part.dim is None or self._grid.tp == 1:
            return share
        shares = [torch.empty_like(share) for _ in range(self._grid.tp)]
        dist.all_gather(shares, share, group=self._groups.tp)
        return torch.cat(shares, part.dim).narrow(part.dim, 0, length).contiguous()

    @torch.no_grad()
    def deal(self, whole: Tensor, name: str, holders: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        """Write a tensor of rank 0, on the meta device elsewhere, into all its holders."""
        if whole.is_meta:
            found = torch.empty(whole.shape, dtype=dtype, device=self._device)
        else:
            found = whole.to(self._device, dtype, copy=True).contiguous()
        if self._grid.size > 1:
            dist.broadcast(found, 0)
        for part in self.own:
            if part.name == name:
                write_share(part, holders, take_share(found, part.dim, self._grid.tp, self._grid.share))


def write_share(part: TensorPart, holders: Mapping[str, Tensor], share: Tensor) -> None:
    """Write a rank's share of a tensor into its holder."""
    view = part.view(holders[part.holder].detach())
    view.copy_(share.reshape(view.shape))
