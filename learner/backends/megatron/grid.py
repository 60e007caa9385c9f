"""Assigns each rank a pipeline stage, a share of each layer and a copy of the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist


@dataclass(frozen=True)
class RankGrid:
    """``size`` ranks as copies of ``pp`` stages, each divided among ``tp`` ranks.

    The ranks of a layer communicate most, so their numbers are neighbours.
    """

    size: int
    tp: int
    pp: int
    rank: int

    @property
    def dp(self) -> int:
        """Copies of the model."""
        return self.size // (self.tp * self.pp)

    @property
    def share(self) -> int:
        """Part of each layer that this rank holds."""
        return self.rank % self.tp

    @property
    def stage(self) -> int:
        """Pipeline stage of this rank."""
        return self.rank // (self.tp * self.dp)

    @property
    def copy(self) -> int:
        """Copy of the model that this rank is a part of."""
        return self.copy_of(self.rank)

    def copy_of(self, rank: int) -> int:
        """Return the copy of the model that a rank is a part of."""
        return rank // self.tp % self.dp

    @property
    def place(self) -> int:
        """Index of this rank in its copy."""
        return self.share + self.tp * self.stage

    def at(self, share: int, copy: int, stage: int) -> int:
        """Return the rank at a place."""
        return share + self.tp * (copy + self.dp * stage)

    @property
    def speakers(self) -> list[int]:
        """For each copy, the first rank of the last stage, which computes the loss."""
        return [self.at(0, copy, self.pp - 1) for copy in range(self.dp)]


class ProcessGroups:
    """The process groups of one rank; making them is collective.

    Attributes:
        tp: ranks that divide a layer.
        dp: ranks that hold the same part of different copies.
        model: ranks of one copy.
        pipeline: ranks of one share in all stages.
        ends: the first and the last stage of one pipeline.
        alone: this rank.
    """

    def __init__(self, grid: RankGrid) -> None:
        shares = range(grid.tp)
        copies = range(grid.dp)
        stages = range(grid.pp)
        self.tp = _own_group(
            grid, [[grid.at(s, c, p) for s in shares] for c in copies for p in stages]
        )
        self.dp = _own_group(
            grid, [[grid.at(s, c, p) for c in copies] for s in shares for p in stages]
        )
        self.model = _own_group(
            grid, [[grid.at(s, c, p) for p in stages for s in shares] for c in copies]
        )
        pipelines = [[grid.at(s, c, p) for p in stages] for s in shares for c in copies]
        self.pipeline = _own_group(grid, pipelines)
        self.alone = _own_group(grid, [[rank] for rank in range(grid.size)])
        self.ends = _own_group(grid, [sorted({line[0], line[-1]}) for line in pipelines])


def _own_group(grid: RankGrid, groups: list[list[int]]) -> Any:
    new_groups = [(ranks, dist.new_group(ranks)) for ranks in groups]
    return next((group for ranks, group in new_groups if grid.rank in ranks), None)
