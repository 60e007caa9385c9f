"""Megatron-core: layers divided over tensor-parallel ranks, stages over pipeline-parallel ones, copies of both side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

from learner.algorithm.kl import kl_penalty
from learner.algorithm.packing import MicroBatchCutter
from learner.algorithm.samples import Array, TrainSample
from learner.backends.batch import Batch
from learner.backends.ddp import DdpBackend
from learner.backends.gathered import Gathered, buckets_of
from learner.backends.lora import Base
from learner.backends.megatron.grid import Grid, Groups
from learner.backends.megatron.model import library
from learner.backends.megatron.optimizer import MegatronOptimizer
from learner.backends.megatron.policy import Measured, MegatronPolicy
from learner.backends.megatron.shell import Shell, open_shell
from learner.backends.optim import Optimizer
from learner.backends.ranks.collectives import sum_over_ranks
from learner.backends.ranks.dealing import Job
from learner.backends.ranks.meeting import join_alone
from learner.backends.ranks.messages import deal
from learner.backends.section_checks import check_megatron
from learner.config import TrainSection
from rlearner_text.config import ModelSection

SLICES_PER_STAGE: Final = 4  # of p stages all compute for a share of 4p / (5p - 1) of the time, if slices are alike


class MegatronBackend(DdpBackend):
    """See ``learner.backends.base.Backend``."""

    target: ClassVar[str] = "learner.backends.megatron.backend:MegatronBackend"
    together: ClassVar[bool] = True
    policy: MegatronPolicy  # type: ignore[assignment]  # of which nothing is asked that is not asked below
    _ref: MegatronPolicy | Base | None  # type: ignore[assignment]
    _optimizer: MegatronOptimizer

    def __init__(self, model_path: str, *, train: TrainSection, ref_path: str | None = None, **others: Any) -> None:
        check_megatron({**train.model_dump(), "backend": "megatron"})
        library()  # before CUDA is used, for it sets what CUDA reads then
        algorithm, model, seat = others["algorithm"], others["model"], others.get("seat")
        section, first = train.megatron, ref_path or model_path
        wanted = [first if train.lora else model_path, *([first] if algorithm.kl_coef else [])]
        self._shells = {path: open_shell(path, model, section) for path in wanted}  # what is wrong is said before any rank starts
        rank = seat.rank if seat is not None else 0
        self._grid = Grid(train.ranks, section.tensor_parallel, section.pipeline_parallel, rank)
        self._groups: Groups | None = None
        super().__init__(model_path, train=train, ref_path=ref_path, **others)

    def _load(  # type: ignore[override]
        self, path: str, model: ModelSection, *, trainable: bool = True, packing: bool
    ) -> MegatronPolicy:
        if self._groups is None:
            self._meet()
            if self.size == 1:
                join_alone(self.device)
                self._met = True
            self._groups = Groups(self._grid)
        shell: Shell = self._shells[path]
        return MegatronPolicy(shell, self._grid, self._groups, self.device, trainable=trainable)

    def _make_optimizer(self, train: TrainSection) -> Optimizer:
        assert self._groups is not None
        self.policy.divide_adapters()
        self._shapes = self.policy.shapes()
        self._buckets = buckets_of(self._shapes)
        return MegatronOptimizer(self.policy, train, self._grid, self._groups, self.device)

    # ------------------------------------------------------------------------------------------------ who does what

    def cutter(self) -> MicroBatchCutter[TrainSample]:
        """With several slices for each stage, as a pipeline is filled and emptied for each micro-batch that is cut."""
        found = super().cutter()
        return MicroBatchCutter(found.budget * (SLICES_PER_STAGE if self._grid.pp > 1 else 1), packed=self._packs)

    @property
    def num_at_once(self) -> int:
        """Slices that are worked on at the same time: one in each stage of each copy."""
        return self._grid.dp * self._grid.pp

    @property
    def num_copies(self) -> int:
        """Of the model: so many deal the slices of a step out among themselves."""
        return self._grid.dp

    def copy_of(self, rank: int) -> int:
        """Of which copy of the model a rank is a part."""
        return self._grid.copy_of(rank)

    @property
    def speakers(self) -> Sequence[int]:
        """Of each copy the rank that says what became of its slices."""
        return self._grid.speakers

    # ------------------------------------------------------------------------------------------------ passes

    def _run_own(self, jobs: Sequence[Job]) -> list[dict[str, float]]:
        batches = [self._collate(part) for part, _ in jobs]
        references = self._references(batches) if self._kl_in_loss else [None] * len(jobs)
        found: list[dict[str, float]] = [{} for _ in jobs]

        def loss(index: int, measured: Measured) -> Tensor:
            batch = batches[index]
            total, sums = self._objective(batch, *measured, references[index], kl_coef=self._kl.value, version=self._version)
            found[index] = self._figures_of(batch, sums)
            return total

        trained = [index for index, (_, train) in enumerate(jobs) if train]
        self.policy.trained(
            [batches[index] for index in trained],
            lambda place, measured: loss(trained[place], measured),
            self._optimizer.collect,
            partial(self._saving, True),
            entropy_grad=self._algorithm.entropy_coef > 0,
        )
        idle = [index for index, (_, train) in enumerate(jobs) if not train]
        for index, measured in zip(idle, self.policy.measured([batches[index] for index in idle]), strict=True):
            if measured is not None:
                loss(index, measured)
        return found

    def _references(self, batches: Sequence[Batch]) -> list[Tensor | None]:
        assert self._ref is not None
        if isinstance(self._ref, MegatronPolicy):
            found = self._ref.measured(batches)
        else:
            assert self.policy.adapters is not None
            with self.policy.adapters.off():
                found = self.policy.measured(batches)
        return [None if measured is None else measured[0] for measured in found]

    def _score_own(self, pieces: Sequence[Sequence[TrainSample]]) -> list[list[Array | None]]:
        batches = [self._collate(piece) for piece in pieces]
        in_reward = self._ref is not None and not self._kl_in_loss
        references = self._references(batches) if in_reward else [None] * len(pieces)
        found: list[list[Array | None]] = []
        for measured, reference, values in zip(self.policy.measured(batches), references, self._values(batches), strict=True):
            logprobs = measured[0] if measured is not None else None
            kl = kl_penalty(logprobs, reference, self._algorithm.kl_estimator) if logprobs is not None and reference is not None else None
            found.append([None if column is None else column.cpu().numpy() for column in (logprobs, kl, values)])
        return found

    @torch.no_grad()
    def _values(self, batches: Sequence[Batch]) -> list[Tensor | None]:
        """Of the critic, each slice's by one of the ranks of a copy, for it is whole on all of them."""
        if self._critic is None:
            return [None] * len(batches)
        found = [torch.zeros(len(batch.targets), device=self.device) for batch in batches]
        for index in deal([batch.input_ids.numel() for batch in batches], self._grid.tp * self._grid.pp)[self._grid.place]:
            found[index] = self._critic.values(batches[index])
        assert self._groups is not None
        sum_over_ranks(found, self.device, self._groups.model)  # one of them knows, the others say 0
        return list(found)

    def _reduced_step(self, denominator: float, at: int) -> dict[str, float]:
        self._optimizer.reduce()
        return self._optimizer.step(denominator, at)

    def _optimizer_step(self, denominator: float, at: int) -> dict[str, float]:
        return self._reduced_step(denominator, at) if self._leader is None else super()._optimizer_step(denominator, at)

    # ------------------------------------------------------------------------------------------------ weights

    def shapes(self) -> dict[str, Tensor]:
        """As ``weights``, on the meta device."""
        return self._shapes

    def weights(self) -> Mapping[str, Tensor]:
        """The weights of now by Hugging Face's names, gathered as they are asked for; all of it before the next step."""
        return Gathered(list(self._shapes), self._buckets, self._gather_all)

    @torch.no_grad()
    def _gather(self, bucket: int) -> dict[str, Tensor]:
        found = {name: self.policy.gather(name) for name in self._buckets[bucket]}
        return {name: tensor for name, tensor in found.items() if tensor is not None}  # none elsewhere than on rank 0

    def _gather_factors(self) -> dict[str, Tensor]:
        """The adapters, whole, on rank 0; by all ranks at once."""
        assert self.policy.adapters is not None
        names = self.policy.adapters.exchange.shapes
        found = {name: factor for name in names if (factor := self.policy.gather_factor(name)) is not None}
        return self.policy.adapters.factors(found.__getitem__) if self.rank == 0 else {}
