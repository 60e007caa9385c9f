"""The backend ``megatron``: tensor, pipeline and data parallel training with Megatron-core."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from learner.algorithm.kl import kl_penalty
from learner.algorithm.samples import Array
from learner.backends.context import RunContext
from learner.backends.megatron.grid import ProcessGroups, RankGrid
from learner.backends.megatron.model import megatron_library
from learner.backends.megatron.model_shell import ModelShell, open_shell
from learner.backends.megatron.optimizer import MegatronOptimizer
from learner.backends.megatron.policy import Measured, MegatronPolicy
from learner.backends.megatron.row_exchange import RowExchange
from learner.backends.models.batch import TokenBatch
from learner.backends.models.lora import exported_name
from learner.backends.models.model_set import ModelSet
from learner.backends.parts.names import ADAPTER, MODEL
from learner.backends.parts.slices import Slice
from learner.backends.passes import ModelPasses
from learner.backends.ranks.collectives import sum_over_ranks
from learner.backends.ranks.dealing import Job
from learner.backends.ranks.group import RankGroup, RankLayout
from learner.backends.ranks.messages import deal_slices
from learner.backends.section_checks import check_megatron
from learner.backends.sent_runs import SentRun
from learner.backends.torch import BuildWorker, TorchBackend
from learner.backends.weights import ShardedWeights
from learner.backends.worker import RankWorker, prepare_process

# p stages then compute for 4p / (5p - 1) of the time, if slices are alike.
SLICES_PER_STAGE: Final = 4


class MegatronWeights(ShardedWeights):
    """Weights that ranks hold parts of; without stripes rank 0 gathers them from all."""

    def __init__(self, policy: MegatronPolicy, grid: RankGrid, groups: ProcessGroups) -> None:
        super().__init__(policy)  # type: ignore[arg-type]
        self._model = policy
        self._rank = grid.rank
        self._rows = RowExchange(grid, groups.tp)

    @torch.no_grad()
    def gather(self, bucket: int) -> dict[str, Tensor]:
        weights = {name: self._model.gather(name) for name in self.buckets[bucket]}
        return {name: tensor for name, tensor in weights.items() if tensor is not None}

    def slices(self) -> Iterator[Slice]:
        trained, exchange = self._model.trained_parameters()
        for piece in exchange.slices(trained):
            if self._model.adapters is not None:
                yield replace(piece, name=ADAPTER + exported_name(piece.name))
            else:
                yield piece.below(MODEL)

    def sent_runs(self, rank: int, size: int) -> Iterator[SentRun]:
        return self._rows.sent_runs(self.slices())

    def factors(self) -> dict[str, Tensor]:
        adapters = self._model.adapters
        assert adapters is not None
        gathered = {name: self._model.gather_factor(name) for name in adapters.exchange.shapes}
        factors = {name: factor for name, factor in gathered.items() if factor is not None}
        if self._rank != 0:
            return {}
        return adapters.factors(factors.__getitem__)


class MegatronPasses(ModelPasses):
    """Passes in which all stages of a copy take part, several slices at a time."""

    def __init__(
        self,
        *args: Any,
        policy: MegatronPolicy,
        grid: RankGrid,
        groups: ProcessGroups,
        **settings: Any,
    ) -> None:
        super().__init__(*args, **settings)
        self._policy = policy
        self._grid = grid
        self._groups = groups

    def run(self, jobs: Sequence[Job]) -> list[dict[str, float]]:
        batches = [self.collate(part) for part, _ in jobs]
        references = self._references(batches, needed=self.models.kl_in_loss)
        results: list[dict[str, float]] = [{} for _ in jobs]

        def loss(index: int, measured: Measured) -> Tensor:
            batch = batches[index]
            reference = references[index]
            total, sums = self.objective(
                batch, *measured, reference, kl_coef=self.kl.value, version=self.version
            )
            results[index] = self.sums_of(batch, sums)
            return total

        trained = [index for index, (_, train) in enumerate(jobs) if train]
        self._policy.train_batches(
            [batches[index] for index in trained],
            lambda place, measured: loss(trained[place], measured),
            self.optimizer.collect,
            self.saving,
            entropy_grad=self.algorithm.entropy_coef > 0,
        )
        idle = [index for index, (_, train) in enumerate(jobs) if not train]
        for index, measured in zip(
            idle, self._policy.measure([batches[index] for index in idle]), strict=True
        ):
            if measured is not None:
                loss(index, measured)
        return results

    def score(self, jobs: Sequence[Job]) -> list[list[Array | None]]:
        """Return each slice's logprobs, divergence and values; None where this rank has none."""
        batches = [self.collate(piece) for piece, _ in jobs]
        references = self._references(batches, needed=self.models.kl_in_reward)
        scores: list[list[Array | None]] = []
        all_measured = self._policy.measure(batches)
        for measured, reference, values in zip(
            all_measured, references, self._values(batches), strict=True
        ):
            logprobs = None if measured is None else measured[0]
            kl = None
            if logprobs is not None and reference is not None:
                kl = kl_penalty(logprobs, reference, self.algorithm.kl_estimator)
            scores.append(
                [
                    None if column is None else column.cpu().numpy()
                    for column in (logprobs, kl, values)
                ]
            )
        return scores

    def _references(self, batches: Sequence[TokenBatch], *, needed: bool) -> list[Tensor | None]:
        if not needed:
            return [None] * len(batches)
        reference: Any = self.models.ref
        if isinstance(reference, MegatronPolicy):
            all_measured = reference.measure(batches)
        else:
            assert self._policy.adapters is not None
            with self._policy.adapters.off():
                all_measured = self._policy.measure(batches)
        return [None if measured is None else measured[0] for measured in all_measured]

    @torch.no_grad()
    def _values(self, batches: Sequence[TokenBatch]) -> list[Tensor | None]:
        """Return the critic's values; all ranks hold it, and those of a copy share the slices."""
        if self.models.critic is None:
            return [None] * len(batches)
        values = [torch.zeros(len(batch.targets), device=self.device) for batch in batches]
        dealt = deal_slices(
            [batch.input_ids.numel() for batch in batches], self._grid.tp * self._grid.pp
        )
        for index in dealt[self._grid.place]:
            values[index] = self.models.critic.values(batches[index])
        # For each slice all ranks but one add 0.
        sum_over_ranks(values, self.device, self._groups.model)
        return list(values)


class MegatronBackend(TorchBackend):
    """See ``learner.backends.base.Backend``."""

    records_tokens = False

    takes_ranks: ClassVar[bool] = True
    offloads: ClassVar[bool] = False

    @classmethod
    def plan(cls, context: RunContext) -> tuple[RunContext, BuildWorker]:
        """Read the models' configurations, to report their errors before any rank starts."""
        check_megatron(context.train.model_copy(update={"backend": "megatron"}))
        # It sets a variable that CUDA reads when it is first used.
        megatron_library()
        paths = [context.policy_path]
        if context.algorithm.kl_coef:
            paths.append(context.first_path)
        shells = {path: open_shell(path, context.model, context.train.megatron) for path in paths}
        return context, partial(_build_worker, shells)

    def plain_logprobs(self, token_ids: Sequence[int] | npt.NDArray[np.generic]) -> Tensor | None:
        # Megatron's layers have only the attention that they train with.
        return None


def _build_worker(
    shells: Mapping[str, ModelShell], context: RunContext, ranks: RankGroup
) -> RankWorker:
    section = context.train.megatron
    rank = ranks.rank
    grid = RankGrid(ranks.size, section.tensor_parallel, section.pipeline_parallel, rank)
    device = prepare_process(context)
    ranks.join(device, alone=True)
    groups = ProcessGroups(grid)

    def load(path: str, trained: bool) -> MegatronPolicy:
        return MegatronPolicy(shells[path], grid, groups, device, trainable=trained)

    models = ModelSet(context, device, rank, load)
    policy: MegatronPolicy = models.policy  # type: ignore[assignment]  # as loaded above
    policy.divide_adapters()
    weights = MegatronWeights(policy, grid, groups)
    optimizer = MegatronOptimizer(policy, context.train, grid, groups, device)
    passes = MegatronPasses(
        context, models, optimizer, device, rank=rank, policy=policy, grid=grid, groups=groups
    )
    # One slice in each stage of each copy.
    num_at_once = grid.dp * grid.pp
    # A pipeline fills and empties once for each micro-batch, so one is cut for several slices of
    # each stage.
    num_per_cut = num_at_once * SLICES_PER_STAGE if grid.pp > 1 else num_at_once
    copies = [grid.copy_of(number) for number in range(ranks.size)]
    layout = RankLayout(copies, grid.speakers, num_at_once, num_per_cut)
    return RankWorker(
        context,
        ranks,
        layout,
        device=device,
        models=models,
        optimizer=optimizer,
        weights=weights,
        passes=passes,
        reduce=optimizer.reduce,
        sharded=True,
    )
