"""The training steps of every backend, and the backend ``torch``: one process, one device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, Final, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from pydantic import TypeAdapter
from torch import Tensor

from broker.contract import wire
from broker.errors import ConfigError, WireError
from broker.settings.registry import resolve
from broker.weights.plan import LayoutPlan
from learner.algorithm.advantages import ADVANTAGES
from learner.algorithm.aggregation import BatchCounts, loss_denominator
from learner.algorithm.packing import MicroBatchCutter, cut_micro_batches, split_minibatches
from learner.algorithm.samples import Array, SampleScores, TrainSample
from learner.algorithm.teaching import trains_divergence
from learner.algorithm.token_figures import TokenFigures
from learner.algorithm.traits import EstimatorTraits, estimator_traits
from learner.backends.base import Snapshot
from learner.backends.context import RunContext
from learner.backends.models.language_model import untrained_parts
from learner.backends.models.lora import is_factor, plain_name
from learner.backends.models.policy import PolicyModel
from learner.backends.parts.hugging_face import (
    ADAPTER_FOLDER,
    write_adapters,
    write_description,
    write_model,
)
from learner.backends.parts.part_file import DamagedFileError, PartFile
from learner.backends.parts.stored import StoredTensors
from learner.backends.parts.stored_model import StoredBase, StoredModel
from learner.backends.ranks.dealing import Job
from learner.backends.ranks.group import RankGroup, RankLayout
from learner.backends.ranks.messages import (
    BuildCommand,
    CollectiveCommand,
    CopyCommand,
    DiscardCommand,
    LoadCommand,
    OffloadCommand,
    ReloadCommand,
    RunCommand,
    ScoreCommand,
    StepCommand,
)
from learner.backends.ranks.rendezvous import Meeting
from learner.backends.staged_part import RankSnapshot
from learner.backends.step_metrics import average_metrics, step_metrics
from learner.backends.stripes import RankStripes
from learner.backends.weights import GatheredWeights
from learner.backends.worker import RankWorker, build_worker
from rlearner_text.chat_template import TEMPLATE_FILE
from rlearner_text.hub import copy_tokenizer
from rlearner_text.tokenizer import Tokenizer

T = TypeVar("T")
BuildWorker = Callable[[RunContext, RankGroup], RankWorker]
_CONTEXT: Final = TypeAdapter(RunContext)


class TorchBackend:
    """See ``learner.backends.base.Backend``, also for methods without a docstring.

    Rank 0 makes one, which starts the other ranks; those call ``follow`` and execute its commands.

    Args:
        settings: the fields of ``RunContext``.

    Attributes:
        takes_ranks: whether ``train.ranks`` may exceed 1.
        records_tokens: whether one rank alone can record entropy and ratio per token.
        offloads: whether ``offload`` and ``reload`` move all that is on the device.
        worker: this rank's.
    """

    takes_ranks: ClassVar[bool] = False
    records_tokens: ClassVar[bool] = True
    offloads: ClassVar[bool] = True

    def __init__(self, model_path: str, **settings: Any) -> None:
        context, build = self.plan(RunContext(model_path, **settings))
        context.check()
        kind = type(self)
        size = context.train.ranks
        if size > 1 and not self.takes_ranks:
            allowed = f"{kind.__name__} runs in one process; train.backend ddp takes several"
            raise ConfigError("train.ranks", size, allowed)
        plain = _CONTEXT.dump_python(context, mode="json")
        self._ranks = RankGroup.start(f"{kind.__module__}:{kind.__qualname__}", size, plain)
        try:
            self.worker = build(context.on_rank(0, self._ranks.num_here), self._ranks)
        except BaseException:
            # Even after Ctrl-C: the other ranks have started already.
            self.close()
            raise
        self._context = context
        self._models = self.worker.models
        self._passes = self.worker.passes
        estimator = resolve("advantages", context.algorithm.adv_estimator, ADVANTAGES)
        traits = estimator_traits(estimator) or EstimatorTraits()
        self._passes.scores_energies = traits.needs_energies
        self._steps = context.train.steps
        self._counts = BatchCounts()
        self._sums: dict[str, float] = {}
        # Of the step's scored samples.
        self._reward_kl: list[Array] = []

    @classmethod
    def plan(cls, context: RunContext) -> tuple[RunContext, BuildWorker]:
        """Check settings before any rank starts; return those to use, and a builder of workers."""
        return context, build_worker

    @classmethod
    def follow(cls, build: BuildCommand, meeting: Meeting) -> RankWorker:
        """Build another rank's worker."""
        context, build_worker = cls.plan(_CONTEXT.validate_python(build.settings))
        ranks = RankGroup(build.size, build.rank, meeting=meeting)
        try:
            return build_worker(context.on_rank(build.local_rank, build.num_here), ranks)
        except BaseException:
            ranks.leave()
            raise

    def follow_rules(self, *, steps: int, seed: int) -> None:
        self._steps = steps
        self._passes.seed = seed

    def cutter(self) -> MicroBatchCutter[TrainSample]:
        budget = self._context.train.micro_batch_tokens * self.worker.layout.num_per_cut
        return MicroBatchCutter(budget, packed=self._passes.packs)

    def forward_backward(self, samples: Sequence[TrainSample]) -> dict[str, float]:
        trained = [sample for sample in samples if sample.num_inputs]
        self._check_ids(trained)
        # Without another term in the loss a row whose advantages are all 0 has no gradient: it is
        # measured, not trained.
        idle: list[TrainSample] = []
        algorithm = self._context.algorithm
        has_other_terms = algorithm.entropy_coef > 0 or algorithm.echo_coef > 0
        if not self._models.kl_in_loss and not has_other_terms:
            idle = [sample for sample in trained if not self._has_gradient(sample)]
        skipped = {id(sample) for sample in idle}
        sums = {
            "tokens": 0.0,
            "rows": 0.0,
            "inputs": float(sum(sample.num_inputs for sample in trained)),
        }
        jobs = [
            (part, True)
            for part in self._slices([sample for sample in trained if id(sample) not in skipped])
        ]
        jobs += [(part, False) for part in self._slices(idle)]
        for slice_sums in self._run(jobs):
            _add_sums(sums, slice_sums)
        self._counts.add(sum(sample.num_tokens for sample in trained), len(trained))
        _add_sums(self._sums, sums)
        return sums

    def _has_gradient(self, sample: TrainSample) -> bool:
        """Return whether a sample has a gradient without a KL or entropy term."""
        if sample.teacher_logprobs is not None and trains_divergence(self._context.algorithm):
            return True
        return bool(sample.advantages[sample.positions].any())

    def step(self) -> dict[str, float]:
        num_rows = self._counts.rows
        return self._complete(self._take(), num_rows)

    def update(self, samples: Sequence[TrainSample]) -> dict[str, float]:
        """Run a step: ``num_epochs`` passes of ``num_minibatches`` updates of critic and policy.

        The policy does not change during the critic's warm-up. With several minibatches, seed,
        version and pass fix the order of the samples, which is the same after a resume; with one,
        it is the order given.
        """
        rows = [sample for sample in samples if sample.num_inputs]
        self._check_ids(rows)
        algorithm = self._context.algorithm
        trains_policy = self._models.critic is None or self.version >= algorithm.critic.warmup_steps
        updates: list[dict[str, float]] = []
        for epoch in range(algorithm.num_epochs):
            for part in split_minibatches(
                rows, algorithm.num_minibatches, (self._passes.seed, self.version, epoch)
            ):
                updates.append(self._update(part, trains_policy))
        metrics = average_metrics(updates, algorithm.num_epochs)
        metrics["actor/num_updates"] = float(len(updates) if trains_policy else 0)
        return self._complete(metrics, len(rows))

    def _update(self, part: Sequence[TrainSample], trains_policy: bool) -> dict[str, float]:
        metrics: dict[str, float] = {}
        if self._models.critic is not None:
            sums: dict[str, float] = {}
            for slice_sums in self._run_critic([(piece, True) for piece in self._slices(part)]):
                _add_sums(sums, slice_sums)
            command = StepCommand(sums.get("tokens", 0.0), self.version, self._steps, critic=True)
            work = partial(self.worker.critic_step, sums, self.version, self._steps)
            metrics = self._ranks.together(command, work)
        if trains_policy:
            for micro in cut_micro_batches(part, self.cutter().budget, packed=self._passes.packs):
                self.forward_backward(micro)
            metrics |= self._take()
        return metrics

    @torch.no_grad()
    def score(self, samples: Sequence[TrainSample]) -> list[SampleScores]:
        rows = [sample for sample in samples if sample.num_inputs]
        self._check_ids(rows)
        scores_by_id: dict[int, SampleScores] = {}
        jobs = [(piece, False) for piece in self._slices(rows)]
        layout = self.worker.layout
        work = self._passes.score
        energies = self._passes.scores_energies
        scored = self._ranks.share_out(
            jobs, layout, lambda slices, _: ScoreCommand(slices, energies), work
        )
        for (piece, _), columns in zip(jobs, scored, strict=True):
            ends = np.cumsum([sample.num_tokens for sample in piece])[:-1].tolist()
            parts = [
                [None] * len(piece) if column is None else np.split(column, ends)
                for column in columns
            ]
            scores = [SampleScores(*row) for row in zip(*parts, strict=True)]
            scores_by_id |= {id(sample): score for sample, score in zip(piece, scores, strict=True)}
        self._reward_kl += [score.kl for score in scores_by_id.values() if score.kl is not None]
        empty = np.zeros(0, np.float32)
        no_kl = empty if self._models.kl_in_reward else None
        no_values = None if self._models.critic is None else empty
        no_scores = SampleScores(empty, no_kl, no_values, empty if energies else None)
        return [scores_by_id.get(id(sample), no_scores) for sample in samples]

    def take_problem(self) -> str:
        return self.worker.take_problem()

    def record_tokens(self) -> bool:
        if self._ranks.size > 1 or not self.records_tokens:
            # The other ranks keep the figures of their tokens.
            return False
        self._passes.recorded = []
        return True

    def take_recorded(self) -> dict[int, TokenFigures]:
        return self._passes.take_recorded()

    def discard(self) -> None:
        if self._ranks.leader is not None:
            self._ranks.leader.send_to_all(DiscardCommand())
        self._passes.discard()
        self._counts = BatchCounts()
        self._sums = {}
        self._reward_kl = []

    def _take(self) -> dict[str, float]:
        """Update the policy; return the metrics."""
        algorithm = self._context.algorithm
        scale = loss_denominator(algorithm.loss_agg_mode, self._counts, self._context.max_length)
        command = StepCommand(scale, self.version, self._steps)
        update = self._ranks.together(
            command, partial(self.worker.step, scale, self.version, self._steps)
        )
        metrics = step_metrics(self._sums, self._counts, scale, algorithm)
        metrics |= {f"actor/{name}": value for name, value in update.items()}
        self._counts = BatchCounts()
        self._sums = {}
        return metrics

    def _complete(self, metrics: dict[str, float], num_rows: int) -> dict[str, float]:
        """End the step."""
        if self._models.ref is not None:
            metrics["actor/kl_coef"] = self.kl_coef
            if self._reward_kl:
                metrics["actor/reward_kl"] = float(np.concatenate(self._reward_kl).mean())
            if (kl := metrics.get("actor/kl_loss", metrics.get("actor/reward_kl"))) is not None:
                self._passes.kl.update(kl, num_rows)
        self._passes.version = self.version + 1
        self._reward_kl = []
        return metrics

    def _run(self, jobs: Sequence[Job]) -> list[dict[str, float]]:
        command = partial(
            RunCommand, kl_coef=self.kl_coef, version=self.version, seed=self._passes.seed
        )
        return self._ranks.share_out(jobs, self.worker.layout, command, self._passes.run)

    def _run_critic(self, jobs: Sequence[Job]) -> list[dict[str, float]]:
        # Every rank holds the whole critic.
        layout = RankLayout.plain(self._ranks.size)
        command = partial(
            RunCommand,
            train=[],
            kl_coef=self.kl_coef,
            version=self.version,
            seed=self._passes.seed,
            critic=True,
        )
        return self._ranks.share_out(
            jobs, layout, lambda slices, _: command(slices), self._passes.run_critic
        )

    def _slices(self, samples: Sequence[TrainSample]) -> list[list[TrainSample]]:
        return self._passes.slices(samples, self.worker.layout.num_at_once)

    def _check_ids(self, samples: Sequence[TrainSample]) -> None:
        size = self.vocab_size
        for sample in samples:
            if (largest := int(sample.token_ids.max())) >= size:
                raise WireError(
                    f"group {sample.group}: token id {largest} is outside "
                    f"the model's vocabulary of {size}"
                )

    @property
    def policy(self) -> PolicyModel:
        """The model that is trained."""
        return self._models.policy

    @property
    def hosts_address(self) -> str:
        return self._ranks.hosts_address

    @property
    def device(self) -> torch.device:
        return self.worker.device

    @property
    def vocab_size(self) -> int:
        return self.policy.vocab_size

    @property
    def version(self) -> int:
        """Steps completed, over all incarnations."""
        return self._passes.version

    @property
    def kl_coef(self) -> float:
        return self._passes.kl.value

    def shapes(self) -> dict[str, Tensor]:
        return self.worker.weights.shapes()

    def weights(self) -> Mapping[str, Tensor]:
        """Return the live weights by state-dict name, adapters merged.

        Sharded ones are gathered as they are read.
        """
        weights = self.worker.weights
        if not weights.buckets:
            return weights.live()
        return GatheredWeights(list(weights.shapes()), weights.buckets, self._gather)

    def _gather(self, bucket: int) -> dict[str, Tensor]:
        return self._ranks.together(
            CollectiveCommand("gather", [bucket]), partial(self.worker.weights.gather, bucket)
        )

    def adapter(self) -> wire.Adapter | None:
        base = self._models.base_digest
        adapters = self.policy.adapters
        if adapters is None or not base:
            return None
        return adapters.describe(base)

    def factors(self) -> dict[str, Tensor]:
        if self.policy.adapters is None:
            return {}
        return self._on_all("factors", self.worker.weights.factors)

    def logprobs(self, token_ids: Sequence[int] | npt.NDArray[np.generic]) -> Tensor:
        return self._on_all(
            "logprobs",
            partial(self.worker.logprobs, token_ids),
            [int(token) for token in token_ids],
        )

    def plain_logprobs(self, token_ids: Sequence[int] | npt.NDArray[np.generic]) -> Tensor | None:
        numbers = [int(token) for token in token_ids]
        return self._on_all(
            "plain_logprobs", partial(self.worker.plain_logprobs, token_ids), numbers
        )

    def _on_all(self, name: str, work: Callable[[], T], numbers: Sequence[int] = ()) -> T:
        """Return ``work()``, on all ranks at the same time if none holds the whole model."""
        if self.worker.sharded:
            return self._ranks.together(CollectiveCommand(name, list(numbers)), work)
        return work()

    def snapshot(self) -> Snapshot:
        """Copy every rank's part of the state to its host memory; training waits only for this.

        Raises:
            RuntimeError: if a step is under way.
        """
        if self._counts.rows:
            raise RuntimeError("a step is under way; its state is taken before or after")
        return RankSnapshot(self._ranks.together(CopyCommand(), self.worker.stage), self._ranks)

    def describe(self, path: str | Path) -> StoredModel:
        folder = Path(path)
        adapters = self.policy.adapters
        base = None
        if adapters is not None:
            adapter = adapters.describe("")
            base = StoredBase(
                self._context.first_path,
                list(adapter.targets),
                adapter.scale,
                list(adapter.transposed),
                {
                    name: exported
                    for name, exported in adapters.exported_names.items()
                    if name != exported
                },
            )
            adapters.save_config(folder / ADAPTER_FOLDER)
        self._write_tokenizer(folder)
        module = self.policy.module
        first = self._context.first_path
        names = {plain_name(name) for name in module.state_dict() if not is_factor(name)}
        untrained = [plain_name(name) for name in untrained_parts(module) if not is_factor(name)]
        shapes = self.shapes()
        return write_description(
            folder, module, shapes, base=base, names=names, untrained=untrained, path=first
        )

    def _write_tokenizer(self, folder: Path) -> None:
        """Write the tokenizer of the first weights, with the chat template that the run uses."""
        model = self._context.model
        first_path = self._context.first_path
        copy_tokenizer(first_path, folder)
        if model.chat_template is not None:
            trusted = model.trust_remote_code
            template = model.chat_template
            tokenizer = Tokenizer.load(
                first_path, trust_remote_code=trusted, chat_template=template
            )
            (folder / TEMPLATE_FILE).write_text(tokenizer.chat_template.source, encoding="utf-8")

    def save(self, path: str | Path) -> None:
        """Write policy, configuration and tokenizer for transformers, adapters also for peft."""
        Path(path).mkdir(parents=True, exist_ok=True)
        # In the target's file system, since /tmp may be too small for the parts.
        with TemporaryDirectory(prefix=".parts.", dir=path) as parts:
            snapshot = self.snapshot()
            files = [part.path for part in snapshot.write(Path(parts))]
            snapshot.drop()
            model = self.describe(path)
            write_adapters(model, files, Path(path))
            write_model(model, files, Path(path))

    def load_state(self, parts: Sequence[PartFile]) -> None:
        for part in parts:
            part.check_size()
        tensors = StoredTensors(part.path for part in parts)
        self.worker.check_shapes({name: entry.shape for name, entry in tensors.entries.items()})
        if problem := self._ranks.verify(list(parts), self.worker.verify):
            raise DamagedFileError(problem)
        self._ranks.together(LoadCommand(list(parts)), partial(self.worker.load, parts))

    def offload(self, folder: str | Path) -> None:
        if self._counts.rows:
            raise RuntimeError("a step is under way; its gradient stays on the device")
        self._ranks.all_done(OffloadCommand(str(folder)), partial(self.worker.offload, str(folder)))

    def reload(self) -> None:
        self._ranks.all_done(ReloadCommand(), self.worker.reload)

    def stripes(self, plan: LayoutPlan) -> RankStripes | None:
        if self._ranks.size == 1 or self.policy.adapters is not None:
            return None
        return RankStripes(plan, self.worker.open_stripe(plan), self._ranks)

    def close(self) -> None:
        # There is no worker if building it has failed.
        if hasattr(self, "worker") and self.worker.stripe is not None:
            self.worker.stripe.stripe.close()
        self._ranks.close()


def _add_sums(into: dict[str, float], values: Mapping[str, float]) -> None:
    for name, value in values.items():
        into[name] = into.get(name, 0.0) + value
