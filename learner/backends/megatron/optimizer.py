"""AdamW over the parts that a rank holds, with its state under Hugging Face's names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from learner.backends.megatron.grid import ProcessGroups, RankGrid
from learner.backends.megatron.policy import MegatronPolicy
from learner.backends.optimizer import MOMENTS, UPDATES, MasterOptimizer
from learner.backends.parts.slices import Slice
from learner.backends.ranks.collectives import sum_over_ranks
from learner.config import TrainSection


class MegatronOptimizer(MasterOptimizer):
    """Every rank updates its parts; parts on several ranks get the same update."""

    def __init__(
        self,
        policy: MegatronPolicy,
        train: TrainSection,
        grid: RankGrid,
        groups: ProcessGroups,
        device: torch.device,
    ) -> None:
        parameters, self._exchange = policy.trained_parameters()
        super().__init__(parameters, train)
        self._grid = grid
        self._groups = groups
        self._device = device
        parts = self._exchange.own
        self._divided = {part.holder for part in parts if part.dim is not None}
        self._copies = {part.holder for part in parts if part.copy}
        self._summed = {part.holder for part in parts if part.summed}
        if grid.stage == 0:
            self._both_ends = "embedding.word_embeddings.weight"
        else:
            self._both_ends = "output_layer.weight"
        self._at_ends = (
            self._both_ends in parameters
            and policy.module.config.tie_word_embeddings
            and grid.pp > 1
        )

    def reduce(self) -> None:
        """Sum gradients of which several ranks have a part."""
        gradients = dict(zip(self._masters, self.gradients(), strict=True))
        if self._grid.tp > 1:
            summed = [gradient for name, gradient in gradients.items() if name in self._summed]
            sum_over_ranks(summed, self._device, self._groups.tp)
        if self._at_ends:
            sum_over_ranks([gradients[self._both_ends]], self._device, self._groups.ends)
        if self._grid.dp > 1:
            sum_over_ranks(list(gradients.values()), self._device, self._groups.dp)

    def norm(self, gradients: list[Tensor]) -> Tensor:
        """Return the norm over all ranks of a copy, each parameter once."""
        squares = torch.zeros((), dtype=torch.float64, device=self._device)
        for name, gradient in zip(self._masters, gradients, strict=True):
            if name not in self._copies and (name in self._divided or self._grid.share == 0):
                squares += gradient.double().square().sum()
        dist.all_reduce(squares, group=self._groups.model)
        return squares.sqrt().float()

    def slices(self) -> Iterator[Slice]:
        """Yield this rank's slices of counts, moments, and masters of rounded weights."""
        for kind, holders in self._holders().items():
            for piece in self._exchange.slices(holders):
                yield replace(piece, name=f"{kind}.{piece.name}")

    def _holders(self) -> dict[str, dict[str, Tensor]]:
        """Return this rank's state by kind and Megatron's name."""
        state = self._adamw.state
        masters = self._masters
        kinds = {
            kind: {name: state[master][kind] for name, master in masters.items()}
            for kind in ("step", *MOMENTS)
        }
        return kinds | ({"master": dict(masters)} if self._rounded else {})

    def shapes(self) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {UPDATES: ()}
        for kind in self._holders():
            for name, like in self._exchange.shapes.items():
                shapes[f"{kind}.{name}"] = () if kind == "step" else tuple(like.shape)
        return shapes
