"""One rank's models, optimizer, weights and passes, and the operations on them that all ranks execute alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from broker.weights import fp8
from broker.weights.memory.offload import OffloadedMemory
from learner.backends.context import RunContext
from learner.backends.models.fake_quantization import quantized_as_sent
from learner.backends.models.model_set import ModelSet
from learner.backends.models.policy import pick_device
from learner.backends.offload import held_tensors
from learner.backends.optimizer import MasterOptimizer
from learner.backends.passes import ModelPasses
from learner.backends.ranks import messages
from learner.backends.ranks.collectives import broadcast_from_rank_0, sum_over_ranks
from learner.backends.ranks.dealing import unpack_slices
from learner.backends.ranks.group import RankGroup, RankLayout
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
    sharded: bool = False  # no rank holds all of the model or its optimizer, so reading either takes all ranks
    offloaded: OffloadedMemory | None = None

    def step(self, denominator: float, at: int) -> dict[str, float]:
        """Update the policy."""
        self.reduce()
        return self.optimizer.step(denominator, at)

    def critic_step(self, sums: Mapping[str, float], at: int) -> dict[str, float]:
        """Update the critic, which every rank holds whole."""
        assert self.models.critic is not None
        if self.ranks.size > 1:
            sum_over_ranks(self.models.critic.optimizer.gradients(), self.device)
        return self.models.critic.step(sums, at)

    def logprobs(self, token_ids: Sequence[int] | npt.NDArray[np.generic]) -> Tensor:
        """Return log p(token[i + 1] | token[: i + 1]) at temperature 1, (n - 1,) float32 on the CPU."""
        rounded = self.context.train.weights_dtype == fp8.NAME  # servers compute with other weights than these
        with quantized_as_sent(self.models.policy) if rounded else nullcontext():
            return self.models.policy.logprobs(torch.tensor(np.asarray(token_ids, np.int64), device=self.device)).cpu()

    def state(self) -> dict[str, Tensor]:
        """Return copies of all but the weights that the next step depends on; CPU tensors, fit for safetensors."""
        state = {f"optimizer.{name}": tensor for name, tensor in self.optimizer.state().items()}
        state["version"] = torch.tensor(self.passes.version)
        state["kl_coef"] = torch.tensor(self.passes.kl.value, dtype=torch.float64)
        if self.models.critic is not None:
            state |= {f"critic.{name}": tensor for name, tensor in self.models.critic.state().items()}
        state["rng.cpu"] = torch.get_rng_state()
        if self.device.type == "cuda":
            state["rng.cuda"] = torch.cuda.get_rng_state(self.device)
        return state

    def offload(self, folder: str) -> None:
        """Move models, gradients and optimizer off the device, between two steps; do nothing else until ``reload``.

        Raises:
            OSError: if the folder cannot be written; nothing has moved then.
        """
        self.offloaded = self.offloaded or OffloadedMemory(folder)
        optimizers = [self.optimizer, *([] if self.models.critic is None else [self.models.critic.optimizer])]
        self.offloaded.release(held_tensors(self.models.modules(), optimizers, self.device))

    def reload(self) -> None:
        """Move everything back."""
        if self.offloaded is not None:
            self.offloaded.restore()

    def obey(self, command: messages.Command) -> messages.Reply | None:
        """Execute one command; return the reply to send."""
        passes = self.passes
        match command:
            case messages.RunCommand(critic=True):
                sums = passes.run_critic([(samples, True) for samples in unpack_slices(command.slices)])
                return messages.SumsReply(sums)
            case messages.RunCommand():
                passes.kl.value, passes.version = command.kl_coef, command.version
                jobs = list(zip(unpack_slices(command.slices), command.train, strict=True))
                return messages.SumsReply(passes.run(jobs))
            case messages.ScoreCommand():
                found = passes.score([(samples, False) for samples in unpack_slices(command.slices)])
                columns = [[None if c is None else c.astype("<f4").tobytes() for c in row] for row in found]
                return messages.ColumnsReply(columns)
            case messages.StepCommand(critic=True):
                self.critic_step({"tokens": command.denominator}, command.at)
            case messages.StepCommand():
                self.step(command.denominator, command.at)
            case messages.DiscardCommand():
                passes.discard()
            case messages.SyncCommand():
                critic = self.models.critic
                optimizer = critic.optimizer if command.critic and critic is not None else self.optimizer
                optimizer.updates = command.updates
                broadcast_from_rank_0(optimizer.tensors(), self.device)
            case messages.CollectiveCommand():
                self._take_part(command)
            case messages.OffloadCommand():
                self.offload(command.folder)
                return messages.SumsReply([])
            case messages.ReloadCommand():
                self.reload()
                return messages.SumsReply([])
            case messages.BuildCommand():
                raise TypeError("the backend has been built already")
        return None

    def _take_part(self, call: messages.CollectiveCommand) -> None:
        match call.name:
            case "logprobs":
                self.logprobs(call.numbers)
            case "state":
                self.optimizer.gather_state()
            case "load":
                self.optimizer.take(self.optimizer.empty_state() | {"updates": torch.tensor(call.numbers[0])})
            case "gather":
                self.weights.gather(call.numbers[0])
            case "factors":
                self.weights.factors()
            case _:
                raise TypeError(f"no operation {call.name}")

    def part(self) -> None:
        self.ranks.leave()


def build_worker(context: RunContext, ranks: RankGroup) -> RankWorker:
    """Build a worker whose rank holds the whole model."""
    device = prepare_process(context)
    models = ModelSet(context, device, ranks.rank)
    ranks.join(device)
    optimizer = MasterOptimizer(models.trained(), context.train)
    passes = ModelPasses(context, models, optimizer, device, rank=ranks.rank)

    def reduce() -> None:
        if ranks.size > 1:
            sum_over_ranks(optimizer.gradients(), device)

    layout, weights = RankLayout.plain(ranks.size), PolicyWeights(models.policy)
    return RankWorker(context, ranks, layout, device, models, optimizer, weights, passes, reduce)
