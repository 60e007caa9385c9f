"""Which rank holds what: its place in a pipeline, its share of a layer, its copy of the model; and the groups in which they talk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist


@dataclass(frozen=True)
class Grid:
    """``size`` ranks as copies of a pipeline of stages of shares: neighbours share layers, as those talk most.

    Attributes:
        tp: ranks that hold a layer together.
        pp: stages that the layers are divided into.
        rank: of this process.
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
        """Which part of each layer this rank holds."""
        return self.rank % self.tp

    @property
    def stage(self) -> int:
        """Which layers."""
        return self.rank // (self.tp * self.dp)

    @property
    def copy(self) -> int:
        """Of which copy of the model."""
        return self.copy_of(self.rank)

    def copy_of(self, rank: int) -> int:
        """Of which copy of the model a rank is a part."""
        return rank // self.tp % self.dp

    @property
    def place(self) -> int:
        """Of this rank among those of its copy."""
        return self.share + self.tp * self.stage

    def at(self, share: int, copy: int, stage: int) -> int:
        """The rank at a place."""
        return share + self.tp * (copy + self.dp * stage)

    @property
    def speakers(self) -> list[int]:
        """Of each copy of the model, one rank that knows the loss: the last stage's first."""
        return [self.at(0, copy, self.pp - 1) for copy in range(self.dp)]


class Groups:
    """Communicators of one rank; all ranks make theirs at the same time.

    Attributes:
        tp: that hold a layer together.
        dp: that hold the same part of different copies.
        model: of one copy.
        pipeline: of one share through all stages.
        ends: the first and the last stage of one pipeline.
        alone: of this rank.
    """

    def __init__(self, grid: Grid) -> None:
        shares, copies, stages = range(grid.tp), range(grid.dp), range(grid.pp)
        self.tp = _mine(grid, [[grid.at(s, c, p) for s in shares] for c in copies for p in stages])
        self.dp = _mine(grid, [[grid.at(s, c, p) for c in copies] for s in shares for p in stages])
        self.model = _mine(grid, [[grid.at(s, c, p) for p in stages for s in shares] for c in copies])
        pipelines = [[grid.at(s, c, p) for p in stages] for s in shares for c in copies]
        self.pipeline = _mine(grid, pipelines)
        self.alone = _mine(grid, [[rank] for rank in range(grid.size)])
        self.ends = _mine(grid, [sorted({line[0], line[-1]}) for line in pipelines])


def _mine(grid: Grid, groups: list[list[int]]) -> Any:
    made = [(ranks, dist.new_group(ranks)) for ranks in groups]
    return next((group for ranks, group in made if grid.rank in ranks), None)
