"""AdamW over the parts that a rank holds, with its state in Hugging Face's names and shapes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from learner.backends.megatron.grid import ProcessGroups, RankGrid
from learner.backends.megatron.policy import MegatronPolicy
from learner.backends.optimizer import MOMENTS, UPDATES, MasterOptimizer
from learner.backends.parts.names import OPTIMIZER
from learner.backends.parts.slices import Slice
from learner.backends.ranks.collectives import sum_over_ranks
from learner.config import TrainSection


class MegatronOptimizer(MasterOptimizer):
    """Every rank updates its parts; parts on several ranks get the same update. Methods are collective."""

    def __init__(
        self, policy: MegatronPolicy, train: TrainSection, grid: RankGrid, groups: ProcessGroups, device: torch.device
    ) -> None:
        parameters, self._exchange = policy.trained_parameters()
        super().__init__(parameters, train)
        self._grid, self._groups, self._device, parts = grid, groups, device, self._exchange.own
        self._divided = {part.holder for part in parts if part.dim is not None}
        self._copies = {part.holder for part in parts if part.copy}
        self._summed = {part.holder for part in parts if part.summed}
        self._both_ends = "embedding.word_embeddings.weight" if grid.stage == 0 else "output_layer.weight"
        self._at_ends = self._both_ends in parameters and policy.module.config.tie_word_embeddings and grid.pp > 1

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

    def gather(self) -> Iterator[Slice]:
        """Yield the state of a model that is not divided: whole tensors on rank 0, only counts elsewhere."""
        count = next(iter(self._adamw.state.values()))["step"]
        for name in self._exchange.shapes:
            yield Slice.whole(f"step.{name}", count)
        for kind, holders in self._holders().items():
            for name in self._exchange.shapes:
                if (found := self._exchange.gather(name, holders, torch.float32)) is not None:
                    yield Slice.whole(f"{kind}.{name}", found, shared=False)

    def _holders(self) -> dict[str, dict[str, Tensor]]:
        """Return this rank's moments, and masters of rounded weights, by kind and Megatron's name."""
        state, masters = self._adamw.state, self._masters
        moments = {kind: {name: state[master][kind] for name, master in masters.items()} for kind in MOMENTS}
        return moments | ({"master": dict(masters)} if self._rounded else {})

    def shapes(self) -> dict[str, tuple[int, ...]]:
        found: dict[str, tuple[int, ...]] = {UPDATES: ()}
        for name, like in self._exchange.shapes.items():
            found[f"step.{name}"] = ()
            found |= {f"{kind}.{name}": tuple(like.shape) for kind in self._holders()}
        return found

    @torch.no_grad()
    def deal(self, stored: Mapping[str, Tensor] | None) -> None:
        """Restore the state that rank 0 reads, a tensor at a time; other ranks pass None."""
        name = next(iter(self._exchange.shapes))
        count = torch.zeros((), device=self._device) if stored is None else stored[f"{OPTIMIZER}step.{name}"]
        count = count.to(self._device)
        if self._grid.size > 1:
            dist.broadcast(count, 0)
        for moments in self._adamw.state.values():
            moments["step"].copy_(count)
        for kind, holders in self._holders().items():
            for name, like in self._exchange.shapes.items():
                whole = like if stored is None else stored[f"{OPTIMIZER}{kind}.{name}"]
                self._exchange.deal(whole, name, holders, torch.float32)
