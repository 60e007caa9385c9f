"""One rank's models, optimizer, weights and passes, and the operations that all ranks execute."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from broker.errors import UserError
from broker.weights import fp8
from broker.weights import plan as plans
from broker.weights.memory.offload import OffloadedMemory
from broker.weights.plan import LayoutPlan
from learner.backends.context import RunContext
from learner.backends.models.fake_quantization import quantized_as_sent
from learner.backends.models.model_set import ModelSet
from learner.backends.models.policy import PolicyModel, pick_device
from learner.backends.offload import device_tensors
from learner.backends.optimizer import UPDATES, MasterOptimizer, shapes_below
from learner.backends.parts.names import CRITIC, KL_COEF, OPTIMIZER, RNG, VERSION
from learner.backends.parts.part_file import PartFile
from learner.backends.parts.slices import Slice, copy_slices
from learner.backends.parts.stored import StoredTensors
from learner.backends.passes import ModelPasses
from learner.backends.ranks import messages
from learner.backends.ranks.collectives import gather_texts, sum_over_ranks
from learner.backends.ranks.dealing import unpack_slices
from learner.backends.ranks.group import RankGroup, RankLayout
from learner.backends.staged_part import StagedPart
from learner.backends.stripes import OwnStripe
from learner.backends.weights import PolicyWeights


def prepare_process(context: RunContext) -> torch.device:
    """Set this process's threads and random numbers; return its device."""
    if context.train.num_threads:
        torch.set_num_threads(context.train.num_threads)
    torch.manual_seed(context.seed)
    return pick_device(context.train.device)


@dataclass
class RankWorker:
    """What one rank computes with."""

    context: RunContext
    ranks: RankGroup
    layout: RankLayout
    device: torch.device
    models: ModelSet
    optimizer: MasterOptimizer
    weights: PolicyWeights
    passes: ModelPasses
    reduce: Callable[[], None]  # called by all ranks before an update: sums the policy's gradients
    # no rank holds all of the model or its optimizer, so reading either takes all ranks
    sharded: bool = False
    offloaded: OffloadedMemory | None = None
    staged: StagedPart | None = None  # of the newest checkpoint
    stripe: OwnStripe | None = None  # of the weights, if all ranks send
    problem: str = ""  # the first tensor by which a gradient was not finite, if it is known

    def step(self, denominator: float, at: int, steps: int) -> dict[str, float]:
        """Update the policy; if the gradient is not finite, change nothing and set ``problem``.

        Args:
            denominator: of the gradient.
            at: steps completed.
            steps: at which the schedule of the learning rate ends.
        """
        self.reduce()
        update = self.optimizer.step(denominator, at, steps)
        if update["skipped"]:
            self._name_problem()
        return update

    def _name_problem(self) -> None:
        problem = self.optimizer.problem
        # The tensor may be in another rank's part.
        if self.sharded:
            texts = gather_texts(problem, self.device)
            problem = next((f"rank {rank}: {text}" for rank, text in enumerate(texts) if text), "")
        self.problem = self.problem or problem

    def take_problem(self) -> str:
        """Return ``problem`` of the updates since the last call."""
        problem = self.problem
        self.problem = ""
        return problem

    def critic_step(self, sums: Mapping[str, float], at: int, steps: int) -> dict[str, float]:
        """Update the critic, which every rank holds whole."""
        assert self.models.critic is not None
        if self.ranks.size > 1:
            sum_over_ranks(self.models.critic.optimizer.gradients(), self.device)
        metrics = self.models.critic.step(sums, at, steps)
        if problem := self.models.critic.optimizer.problem:
            self.problem = self.problem or f"critic: {problem}"
        return metrics

    def logprobs(self, token_ids: Sequence[int] | npt.NDArray[np.generic]) -> Tensor:
        """Return log p(token[i + 1] | token[: i + 1]) at temperature 1.

        Returns:
            (n - 1,) float32 on the CPU.
        """
        # Servers compute with rounded weights, so these must be compared with.
        rounded = self.context.train.weights_dtype == fp8.NAME
        with quantized_as_sent(self.models.policy) if rounded else nullcontext():
            return self.models.policy.logprobs(
                torch.tensor(np.asarray(token_ids, np.int64), device=self.device)
            ).cpu()

    def plain_logprobs(self, token_ids: Sequence[int] | npt.NDArray[np.generic]) -> Tensor:
        """Return what ``logprobs`` does, with plain attention."""
        with self.models.policy.plain_attention():
            return self.logprobs(token_ids)

    def stage(self) -> StagedPart:
        """Copy this rank's part of a checkpoint to host memory; all ranks do."""
        rank = self.ranks.rank
        size = self.ranks.size
        staged = list[Slice]()
        for slices in (self.policy_slices(), self.critic_slices(), self.numbers()):
            staged += copy_slices(slices, rank, size)
        return StagedPart(staged, rank, size)

    def offload(self, folder: str) -> None:
        """Move everything off the device, between two steps; only ``reload`` may follow.

        Raises:
            OSError: if the folder cannot be written; nothing has moved then.
        """
        self.offloaded = self.offloaded or OffloadedMemory(folder)
        optimizers = [self.optimizer]
        if self.models.critic is not None:
            optimizers.append(self.models.critic.optimizer)
        self.offloaded.release(device_tensors(self.models.modules(), optimizers, self.device))

    def reload(self) -> None:
        """Move everything back."""
        if self.offloaded is not None:
            self.offloaded.restore()

    def policy_slices(self) -> Iterator[Slice]:
        """Yield this rank's slices of policy and optimizer; all ranks read them in order."""
        yield from self.weights.slices()
        yield from self.optimizer_slices()

    def optimizer_slices(self) -> Iterator[Slice]:
        """Yield this rank's slices of the policy's optimizer."""
        for piece in self.optimizer.slices():
            yield piece.below(OPTIMIZER)

    def critic_slices(self) -> Iterator[Slice]:
        """Yield the critic, which every rank holds whole, and its optimizer."""
        if self.models.critic is not None:
            for piece in self.models.critic.slices():
                yield piece.below(CRITIC)

    def numbers(self) -> list[Slice]:
        """Return what one rank writes whole: counts, and its random numbers."""
        rank = self.ranks.rank
        device = self.device
        tensors: dict[str, Tensor] = {}
        tensors[_rng_name("cpu", rank)] = torch.get_rng_state()
        if device.type == "cuda":
            tensors[_rng_name("cuda", rank)] = torch.cuda.get_rng_state(device)
        if rank == 0:
            tensors[VERSION] = torch.tensor(self.passes.version)
            tensors[KL_COEF] = torch.tensor(self.passes.kl.value, dtype=torch.float64)
            tensors[OPTIMIZER + UPDATES] = torch.tensor(self.optimizer.updates)
            if self.models.critic is not None:
                tensors[CRITIC + OPTIMIZER + UPDATES] = torch.tensor(
                    self.models.critic.optimizer.updates
                )
        return [Slice.whole(name, tensor, shared=False) for name, tensor in tensors.items()]

    def check_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Check the shapes of a checkpoint's tensors.

        Raises:
            UserError: if it belongs to another model.
        """
        if missing := [
            name for name in (VERSION, KL_COEF, _rng_name("cpu", 0)) if name not in shapes
        ]:
            raise UserError(f"the checkpoint has no {missing[0]}")
        self.optimizer.check_shapes(shapes_below(OPTIMIZER, shapes))
        if self.models.critic is not None:
            self.models.critic.check_shapes(shapes_below(CRITIC, shapes))

    def verify(self, parts: Sequence[PartFile]) -> str:
        """Read this rank's share of a checkpoint's files; return the first fault, empty if none."""
        try:
            for part in parts[self.ranks.rank :: self.ranks.size]:
                part.verify()
        except UserError as error:
            return str(error)
        return ""

    def load(self, parts: Sequence[PartFile]) -> None:
        """Restore all but the weights from a checkpoint's files; all ranks do.

        A GPU's random numbers are restored only where there is a GPU, a rank's only where there is
        that rank.
        """
        tensors = StoredTensors(part.path for part in parts)
        tensors.load(self.optimizer_slices())
        tensors.load(self.critic_slices())
        self.optimizer.finish_restore(int(tensors[OPTIMIZER + UPDATES]))
        if self.models.critic is not None:
            self.models.critic.optimizer.finish_restore(int(tensors[CRITIC + OPTIMIZER + UPDATES]))
        self.passes.version = int(tensors[VERSION])
        # A fixed coefficient is the configuration's, which may have changed since.
        if self.passes.kl.target is not None:
            self.passes.kl.value = float(tensors[KL_COEF])
        rank = self.ranks.rank
        if _rng_name("cpu", rank) in tensors:
            torch.set_rng_state(tensors[_rng_name("cpu", rank)])
        if self.device.type == "cuda" and _rng_name("cuda", rank) in tensors:
            torch.cuda.set_rng_state(tensors[_rng_name("cuda", rank)], self.device)

    def obey(
        self, command: messages.WorkCommand, send: Callable[[messages.Reply], None]
    ) -> messages.Reply | None:
        """Execute one command; return the reply to send now, and ``send`` what follows later."""
        passes = self.passes
        match command:
            case messages.RunCommand(critic=True):
                sums = passes.run_critic(
                    [(samples, True) for samples in unpack_slices(command.slices)]
                )
                return messages.SumsReply(sums)
            case messages.RunCommand():
                passes.kl.value = command.kl_coef
                passes.version = command.version
                passes.seed = command.seed
                jobs = list(zip(unpack_slices(command.slices), command.train, strict=True))
                return messages.SumsReply(passes.run(jobs))
            case messages.ScoreCommand():
                passes.scores_energies = command.energies
                scores = passes.score(
                    [(samples, False) for samples in unpack_slices(command.slices)]
                )
                columns = [
                    [None if column is None else column.astype("<f4").tobytes() for column in row]
                    for row in scores
                ]
                return messages.ColumnsReply(columns)
            case messages.StepCommand(critic=True):
                self.critic_step({"tokens": command.denominator}, command.at, command.steps)
            case messages.StepCommand():
                self.step(command.denominator, command.at, command.steps)
            case messages.DiscardCommand():
                passes.discard()
            case messages.CopyCommand():
                # Free the memory of the previous copy first.
                self.staged = None
                self.staged = self.stage()
            case messages.WriteCommand():
                assert self.staged is not None
                self.staged.write_in_thread(command.folder, send)
            case messages.DropCommand():
                self.staged = None
            case messages.VerifyCommand():
                return messages.VerifiedReply(self.verify(command.parts))
            case messages.LoadCommand():
                self.load(command.parts)
            case messages.OpenStripesCommand():
                return messages.StripeReply(
                    self.open_stripe(plans.from_text(command.plan)).stripe.plan.text
                )
            case messages.ServeStripesCommand():
                assert self.stripe is not None, "it was opened"
                self.stripe.serve(command)
            case messages.CollectiveCommand():
                self._take_part(command)
            case messages.OffloadCommand():
                self.offload(command.folder)
                return messages.SumsReply([])
            case messages.ReloadCommand():
                self.reload()
                return messages.SumsReply([])
        return None

    def _take_part(self, call: messages.CollectiveCommand) -> None:
        match call.name:
            case "logprobs":
                self.logprobs(call.numbers)
            case "plain_logprobs":
                self.plain_logprobs(call.numbers)
            case "gather":
                self.weights.gather(call.numbers[0])
            case "factors":
                self.weights.factors()
            case "stage":
                assert self.stripe is not None, "it was opened"
                self.stripe.stage(call.numbers[0])
            case _:
                raise TypeError(f"no operation {call.name}")

    def open_stripe(self, plan: LayoutPlan) -> OwnStripe:
        """Divide the weights' plan by what this rank holds."""
        self.stripe = OwnStripe(plan, self.weights, self.ranks, self.device)
        return self.stripe

    def part(self) -> None:
        if self.stripe is not None:
            self.stripe.stripe.close()
        self.ranks.leave()


def _rng_name(device: str, rank: int) -> str:
    """Return the name of a rank's random numbers."""
    # Rank 0's has no number, as in checkpoints of one rank.
    if rank == 0:
        return f"{RNG}{device}"
    return f"{RNG}{device}.{rank}"


def build_worker(
    context: RunContext, ranks: RankGroup, *, kind: type[PolicyModel] = PolicyModel
) -> RankWorker:
    """Build a worker whose rank holds the whole model.

    Args:
        kind: of the policy.
    """
    device = prepare_process(context)
    models = ModelSet(context, device, ranks.rank, kind=kind)
    ranks.join(device)
    optimizer = MasterOptimizer(models.trained_parameters(), context.train)
    passes = ModelPasses(context, models, optimizer, device, rank=ranks.rank)

    def reduce() -> None:
        if ranks.size > 1:
            sum_over_ranks(optimizer.gradients(), device)

    layout = RankLayout.plain(ranks.size)
    weights = PolicyWeights(models.policy)
    return RankWorker(
        context,
        ranks,
        layout,
        device=device,
        models=models,
        optimizer=optimizer,
        weights=weights,
        passes=passes,
        reduce=reduce,
    )
