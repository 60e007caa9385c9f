"""Data parallel on several ranks: every rank holds the whole model and its optimizer, gradients are summed over ranks.

See ``learner.backends.ranks`` for who does what.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from learner.algorithm.packing import MicroBatchCutter, by_length
from learner.algorithm.samples import Array, TrainSample
from learner.backends.optim import Optimizer
from learner.backends.ranks.collectives import from_rank_0, sum_over_ranks
from learner.backends.ranks.critic import CriticOnRanks
from learner.backends.ranks.dealing import Job, Share, deal_jobs, in_order, own, packed, unpacked
from learner.backends.ranks.leader import Leader
from learner.backends.ranks.meeting import join, on_rank
from learner.backends.ranks.messages import Build, Call, Columns, Command, Discard, Reply, Run, Score, Step, Sums, Sync
from learner.backends.torch import TorchBackend
from learner.config import AlgorithmSection, TrainSection
from rlearner_text.config import ModelSection

T = TypeVar("T")


class DdpBackend(CriticOnRanks):
    """See ``learner.backends.base.Backend``. On rank 0 it is what the learner calls, on the others it obeys.

    Args:
        seat: of a rank that obeys; None makes this process rank 0, which starts the others.
        others: what ``TorchBackend`` takes.
    """

    takes_ranks = True
    target: ClassVar[str] = "learner.backends.ddp:DdpBackend"
    same_number: ClassVar[bool] = False  # of slices on every rank, for backends whose every pass needs all of them
    together: ClassVar[bool] = False  # no rank has the whole model, or its optimizer: to read either needs all

    def __init__(
        self,
        model_path: str,
        *,
        train: TrainSection,
        algorithm: AlgorithmSection,
        model: ModelSection,
        seed: int,
        ref_path: str | None = None,
        max_length: int | None = None,
        seat: Build | None = None,
    ) -> None:
        self.size, self.rank, self._seat = train.ranks, seat.rank if seat else 0, seat
        self._leader: Leader | None = None
        self._met = False
        others: dict[str, Any] = {"seed": seed, "ref_path": ref_path, "max_length": max_length}
        if seat is None and self.size > 1:
            sections = {"train": train, "algorithm": algorithm, "model": model}
            dumped = {name: section.model_dump(mode="json") for name, section in sections.items()}
            self._leader = Leader(self.target, self.size, {"model_path": model_path, **others, **dumped})
        try:
            super().__init__(model_path, train=on_rank(train, self.rank), algorithm=algorithm, model=model, **others)
        except BaseException:
            self.close()
            raise

    def _make_optimizer(self, train: TrainSection) -> Optimizer:
        self._meet()
        return super()._make_optimizer(train)

    def _meet(self) -> None:
        """Once this rank's models are loaded, and so will be the others'."""
        if self._leader is not None:
            with self._leader.working():
                self._leader.arm()
                join(self._leader.store, self.rank, self.size, self.device)
            self._met = True
        elif self._seat is not None:
            join(self._seat.store, self.rank, self.size, self.device)
            self._met = True

    def _all_at_once(self, call: Call, work: Callable[[], T]) -> T:
        """``work`` on rank 0 while the others ``take_part``; alone where there are no others."""
        if self._leader is None:
            return work()
        with self._leader.working():
            self._leader.tell(call)
            return work()

    def _load_optimizer(self, state: Mapping[str, Tensor]) -> None:
        if self.together:
            self._optimizer.refuse(state, self._optimizer.empty_state())
            self._all_at_once(Call("load", [int(state["updates"])]), partial(self._optimizer.take, state))
            return
        super()._load_optimizer(state)
        if self._leader is not None:
            with self._leader.working():
                self._leader.tell(Sync(self._optimizer.updates))
                from_rank_0(self._optimizer.tensors(), self.device)

    # ------------------------------------------------------------------------------------------------ what the learner calls

    def cutter(self) -> MicroBatchCutter[TrainSample]:
        """As that of one rank, with room for as many micro-batches as are worked on at once."""
        return MicroBatchCutter(self._micro_tokens * self.num_at_once, packed=self._packs)

    def logprobs(self, token_ids: Sequence[int] | npt.NDArray[np.generic]) -> Tensor:
        """log p(token[i + 1] | token[: i + 1]) at temperature 1, (n - 1,) float32 on the CPU."""
        work = partial(super().logprobs, token_ids)
        return self._all_at_once(Call("logprobs", [int(token) for token in token_ids]), work) if self.together else work()

    def state(self) -> dict[str, Tensor]:
        """Copies of all but the weights that the next step depends on, gathered into this process's memory."""
        work = super().state
        return self._all_at_once(Call("state"), work) if self.together else work()

    def _factors(self) -> dict[str, Tensor]:
        if not self.together or self.policy.adapters is None:
            return super()._factors()
        return self._all_at_once(Call("factors"), self._gather_factors)

    def discard(self) -> None:
        """Forget what was added since the last step, as if the step under way had not begun."""
        if self._leader is not None:
            self._leader.tell(Discard())
        super().discard()

    def close(self) -> None:
        """Let the other ranks leave."""
        if self._leader is not None:
            self._leader.close()
            self._leader = None
        self.part()

    # ------------------------------------------------------------------------------------------------ shared work

    @property
    def num_at_once(self) -> int:
        """Slices that are worked on at the same time."""
        return self.size

    @property
    def num_copies(self) -> int:
        """Of the model: so many deal the slices of a step out among themselves."""
        return self.size

    def copy_of(self, rank: int) -> int:
        """Of which copy of the model a rank is a part, or which it has."""
        return rank

    @property
    def speakers(self) -> Sequence[int]:
        """Of each copy the rank that says what became of its slices."""
        return range(self.size)

    def _slices(self, samples: Sequence[TrainSample]) -> list[list[TrainSample]]:
        found, wanted = super()._slices(samples), self.num_at_once
        if wanted == 1 or not found or len(found) >= wanted or len(samples) <= len(found):
            return found
        budget = -(-sum(sample.num_inputs for sample in samples) // wanted)  # smaller ones, so that all have something to do
        return by_length(samples, min(budget, self._slice_tokens), packed=True)

    def _run_all(self, jobs: Sequence[Job]) -> list[dict[str, float]]:
        if self._leader is None:
            return self._run_own(jobs)
        dealt = self._deal(jobs)
        with self._leader.working():
            for rank, shares in enumerate(dealt[1:], 1):
                self._leader.tell_one(rank, Run(packed(jobs, shares), [train for _, train in shares], self._kl.value, self._version))
            done = [self._run_own(own(jobs, dealt[0]))]
            done += [reply.slices for reply in self._leader.replies() if isinstance(reply, Sums)]
        return self._in_order(dealt, done)

    def _score_all(self, pieces: Sequence[Sequence[TrainSample]]) -> list[list[Array | None]]:
        if self._leader is None:
            return self._score_own(pieces)
        jobs: list[Job] = [(piece, False) for piece in pieces]
        dealt = self._deal(jobs)
        with self._leader.working():
            for rank, shares in enumerate(dealt[1:], 1):
                self._leader.tell_one(rank, Score(packed(jobs, shares)))
            done = [self._score_own([part for part, _ in own(jobs, dealt[0])])]
            for reply in self._leader.replies():
                if isinstance(reply, Columns):
                    done.append([[None if c is None else np.frombuffer(c, "<f4") for c in columns] for columns in reply.slices])
        return self._in_order(dealt, done)

    def _run_own(self, jobs: Sequence[Job]) -> list[dict[str, float]]:
        """This rank's share of a step."""
        return TorchBackend._run_all(self, jobs)

    def _score_own(self, pieces: Sequence[Sequence[TrainSample]]) -> list[list[Array | None]]:
        """This rank's share of what is only measured."""
        return TorchBackend._score_all(self, pieces)

    def _deal(self, jobs: Sequence[Job]) -> list[list[Share]]:
        dealt = deal_jobs(jobs, self.num_copies, same_number=self.same_number)
        return [dealt[self.copy_of(rank)] for rank in range(self.size)]

    def _in_order(self, dealt: Sequence[Sequence[Share]], done: Sequence[Sequence[T]]) -> list[T]:
        return in_order([dealt[rank] for rank in self.speakers], [done[rank] for rank in self.speakers])

    def _optimizer_step(self, denominator: float, at: int) -> dict[str, float]:
        if self._leader is None:
            return super()._optimizer_step(denominator, at)
        with self._leader.working():
            self._leader.tell(Step(denominator, at))
            return self._reduced_step(denominator, at)

    def _reduced_step(self, denominator: float, at: int) -> dict[str, float]:
        """On every rank at once."""
        sum_over_ranks(self._optimizer.gradients(), self.device)
        return self._optimizer.step(denominator, at)

    # ------------------------------------------------------------------------------------------------ a rank that obeys

    @classmethod
    def follow(cls, build: Build) -> DdpBackend:
        """Take a seat."""
        settings: dict[str, Any] = dict(build.settings)
        for name, kind in (("train", TrainSection), ("algorithm", AlgorithmSection), ("model", ModelSection)):
            settings[name] = kind.model_validate(settings[name])
        return cls(settings.pop("model_path"), **settings, seat=build)

    def obey(self, command: Command) -> Reply | None:
        """Do one command; what is to be answered."""
        match command:
            case Run(critic=True):
                return Sums(TorchBackend._run_critic(self, unpacked(command.slices)))
            case Run():
                self._kl.value, self._version = command.kl_coef, command.version
                return Sums(self._run_own(list(zip(unpacked(command.slices), command.train, strict=True))))
            case Score():
                found = self._score_own(unpacked(command.slices))
                return Columns([[None if c is None else c.astype("<f4").tobytes() for c in columns] for columns in found])
            case Step(critic=True):
                self._reduced_critic_step({"tokens": command.denominator}, command.at)
            case Step():
                self._reduced_step(command.denominator, command.at)
            case Discard():
                TorchBackend.discard(self)
            case Sync():
                optimizer = self._critic.optimizer if command.critic and self._critic is not None else self._optimizer
                optimizer.updates = command.updates
                from_rank_0(optimizer.tensors(), self.device)
            case Call():
                self.take_part(command)
            case Build():
                raise TypeError("it is built already")
        return None

    def take_part(self, call: Call) -> None:
        """The others' part of what rank 0 does with all ranks at once."""
        match call.name:
            case "logprobs":
                TorchBackend.logprobs(self, call.numbers)
            case "state":
                self._optimizer.gather_state()
            case "load":
                self._optimizer.take(self._optimizer.empty_state() | {"updates": torch.tensor(call.numbers[0])})
            case "gather":
                self._gather(call.numbers[0])
            case "factors":
                self._gather_factors()
            case _:
                raise TypeError(f"no operation {call.name}")

    def _gather_all(self, bucket: int) -> dict[str, Tensor]:
        return self._all_at_once(Call("gather", [bucket]), partial(self._gather, bucket))

    def _gather(self, bucket: int) -> dict[str, Tensor]:
        """Whole weights of a bucket, by all ranks at once, of backends that have none.

        Raises:
            TypeError: this one has them whole.
        """
        raise TypeError(f"{type(self).__name__} gathers no bucket {bucket}")

    def _gather_factors(self) -> dict[str, Tensor]:
        """The adapters, whole, by all ranks at once."""
        return TorchBackend._factors(self)

    def part(self) -> None:
        """Leave the group."""
        if self._met and dist.is_initialized():
            dist.destroy_process_group()
        self._met = False
