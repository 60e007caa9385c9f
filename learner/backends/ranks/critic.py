"""A critic on several ranks: whole on each of them, whatever becomes of the policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from learner.algorithm.samples import TrainSample
from learner.backends.ranks.collectives import from_rank_0, sum_over_ranks
from learner.backends.ranks.dealing import Job, Share, in_order, own, packed
from learner.backends.ranks.leader import Leader
from learner.backends.ranks.messages import Run, Step, Sums, Sync, deal
from learner.backends.torch import TorchBackend


class CriticOnRanks(TorchBackend):
    """What ``learner.backends.ddp.DdpBackend`` does about a critic."""

    size: int
    _leader: Leader | None

    def _load_critic(self, state: Mapping[str, Tensor]) -> None:
        super()._load_critic(state)
        if self._leader is not None and self._critic is not None:
            with self._leader.working():
                self._leader.tell(Sync(self._critic.optimizer.updates, critic=True))
                from_rank_0(self._critic.optimizer.tensors(), self.device)

    def _run_critic(self, pieces: Sequence[Sequence[TrainSample]]) -> list[dict[str, float]]:
        if self._leader is None:
            return super()._run_critic(pieces)
        jobs: list[Job] = [(piece, True) for piece in pieces]
        parts = deal([sum(sample.num_inputs for sample in piece) for piece in pieces], self.size)
        dealt: list[list[Share]] = [[(index, True) for index in part] for part in parts]
        with self._leader.working():
            for rank, shares in enumerate(dealt[1:], 1):
                self._leader.tell_one(rank, Run(packed(jobs, shares), [], self._kl.value, self._version, critic=True))
            done: list[list[dict[str, float]]] = [super()._run_critic([part for part, _ in own(jobs, dealt[0])])]
            done += [reply.slices for reply in self._leader.replies() if isinstance(reply, Sums)]
        return in_order(dealt, done)

    def _critic_step(self, sums: Mapping[str, float], at: int) -> dict[str, float]:
        if self._leader is None:
            return super()._critic_step(sums, at)
        with self._leader.working():
            self._leader.tell(Step(sums.get("tokens", 0.0), at, critic=True))
            return self._reduced_critic_step(sums, at)

    def _reduced_critic_step(self, sums: Mapping[str, float], at: int) -> dict[str, float]:
        """On every rank at once: the critic is whole on all of them, whatever becomes of the policy."""
        assert self._critic is not None
        sum_over_ranks(self._critic.optimizer.gradients(), self.device)
        return TorchBackend._critic_step(self, sums, at)
