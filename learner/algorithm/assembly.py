"""Turns scored groups into training samples: shaping, advantages, whitening, clips, masks.

Group by group if the algorithm allows it, so that a step can start while it is still being
generated; otherwise all at once. Pure, except for scoring by models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from broker.contract import wire
from learner.algorithm.advantages import base
from learner.algorithm.advantages.base import (
    AdvantageEstimate,
    BatchRow,
    FloatArray,
    sampled_positions,
)
from learner.algorithm.samples import Array, SampleScores, TrainSample, from_trajectory
from learner.algorithm.shaping import is_truncated, minus_kl, needs_batch, shape_rewards
from learner.algorithm.teaching import add_teacher
from learner.algorithm.token_selection import SELECTORS, select_tokens
from learner.algorithm.traits import EstimatorTraits, estimator_traits
from learner.config import AlgorithmSection, kl_in_reward, num_updates

Score = Callable[[Sequence[TrainSample]], list[SampleScores]]


class SampleAssembler:
    """Converter of groups to training samples, by an algorithm.

    Args:
        estimator: of the registry in learner/algorithm/advantages, resolved.
        algorithm: its settings.
        stream: False waits for the whole step even if that is not needed.
    """

    def __init__(self, estimator: Any, algorithm: AlgorithmSection, *, stream: bool = True) -> None:
        self._estimator = estimator
        self._algorithm = algorithm
        traits = estimator_traits(estimator) or EstimatorTraits()
        self._over_rows = traits.whole_batch
        # Whether `batch` must be used, with all groups of a step, instead of `stream`; and with
        # scores from the models.
        self.needs_batch = self._over_rows or not stream or waits_for_batch(algorithm)
        self.needs_scores = scores_needed(algorithm) or traits.needs_energies
        # Whether all groups of a step are scored, so that the models can begin with the first.
        self.scores_stream = self.needs_scores and stream and algorithm.pg_variant != "starpo_s"

    def stream(self, group: wire.Group) -> list[TrainSample]:
        """Return one sample per trajectory of a scored group, in its order."""
        (shaped,) = shape_rewards([group], self._algorithm)
        estimates = self._estimate_trajectories(shaped.trajectories)
        return [
            self._sample(group, trajectory, advantages)
            for trajectory, advantages in zip(
                group.trajectories, self._clip(estimates), strict=True
            )
        ]

    def unscored(self, group: wire.Group) -> list[TrainSample]:
        """Return a group's samples as ``batch`` has them scored, in its order."""
        return [
            self._sample(
                group,
                trajectory,
                np.zeros(len(trajectory.loss_mask.array())),
                with_all_tokens=True,
            )
            for trajectory in group.trajectories
        ]

    def batch(
        self, groups: Sequence[wire.Group], score: Score | None = None, kl_coef: float = 0.0
    ) -> list[TrainSample]:
        """Return the samples of a whole step, in the order of its groups.

        Args:
            groups: those of the step that are trained on, in the order of the log.
            score: scores samples with the models; needed if ``needs_scores``.
            kl_coef: weight of the divergence from the reference, if it is part of the reward.
        """
        algorithm = self._algorithm
        pairs = [(group, trajectory) for group in groups for trajectory in group.trajectories]
        scores = [SampleScores() for _ in pairs]
        if self.needs_scores and score is not None:
            scores = score([sample for group in groups for sample in self.unscored(group)])
        kl = [
            self._kl_penalties(trajectory, sample_scores, kl_coef)
            for (_, trajectory), sample_scores in zip(pairs, scores, strict=True)
        ]
        shaped = shape_rewards(groups, algorithm)
        if self._over_rows:
            estimates = self._estimate_rows(shaped, scores, kl)
        else:
            estimates = self._estimate_groups(shaped, kl)
        if algorithm.whiten_advantages:
            white = base.whiten_arrays(
                [estimate.advantages for estimate in estimates],
                [self._is_trained(trajectory) for _, trajectory in pairs],
            )
            estimates = [
                replace(estimate, advantages=advantages)
                for estimate, advantages in zip(estimates, white, strict=True)
            ]
        samples = []
        for (group, trajectory), estimate, sample_scores in zip(
            pairs, estimates, scores, strict=True
        ):
            (clipped,) = self._clip([_scatter_values(trajectory, estimate.advantages)])
            samples.append(
                replace(
                    self._sample(group, trajectory, clipped),
                    proximal_logprobs=_as_column(trajectory, sample_scores.logprobs),
                    values=_as_column(trajectory, sample_scores.values),
                    returns=_as_column(trajectory, estimate.returns),
                )
            )
        return select_tokens(samples, algorithm) if algorithm.pg_variant in SELECTORS else samples

    def _estimate_rows(
        self, groups: Sequence[wire.Group], scores: Sequence[SampleScores], kl: Sequence[FloatArray]
    ) -> list[AdvantageEstimate]:
        pairs = [(group, trajectory) for group in groups for trajectory in group.trajectories]
        # what is compared: the samples of a ticket, or of one seat in it
        keys = [(group.ticket, self._compared_seat(trajectory)) for group, trajectory in pairs]
        numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
        rows = [
            BatchRow(
                numbers[key],
                base.token_rewards(trajectory) - penalties,
                _as_float64(sample_scores.values),
                trained=self._is_trained(trajectory),
                turns=base.token_turns(trajectory),
                energies=_as_float64(sample_scores.energies),
                parts=trajectory.reward_parts,
            )
            for key, (_, trajectory), sample_scores, penalties in zip(
                keys, pairs, scores, kl, strict=True
            )
        ]
        estimates: list[AdvantageEstimate] = self._estimator(rows, self._algorithm)
        return estimates

    def _estimate_groups(
        self, groups: Sequence[wire.Group], kl: Sequence[FloatArray]
    ) -> list[AdvantageEstimate]:
        penalties = iter(kl)
        estimates = []
        for group in groups:
            trajectories = [
                minus_kl(trajectory, next(penalties)) for trajectory in group.trajectories
            ]
            arrays = self._estimate_trajectories(trajectories)
            estimates += [
                AdvantageEstimate(advantages[sampled_positions(trajectory)])
                for trajectory, advantages in zip(trajectories, arrays, strict=True)
            ]
        return estimates

    def _estimate_trajectories(self, trajectories: Sequence[wire.Trajectory]) -> list[FloatArray]:
        """Return a group's advantages, of each seat's samples among themselves."""
        seats = dict.fromkeys(self._compared_seat(trajectory) for trajectory in trajectories)
        arrays: dict[int, FloatArray] = {}
        for seat in seats:
            rows = [
                row
                for row, trajectory in enumerate(trajectories)
                if self._compared_seat(trajectory) == seat
            ]
            own = [trajectories[row] for row in rows]
            arrays |= zip(rows, self._estimator(own, self._algorithm), strict=True)
        return [arrays[row] for row in range(len(trajectories))]

    def _compared_seat(self, trajectory: wire.Trajectory) -> str:
        return trajectory.seat if self._algorithm.seat_baseline == "own" else ""

    def _kl_penalties(
        self, trajectory: wire.Trajectory, scores: SampleScores, kl_coef: float
    ) -> FloatArray:
        num = len(sampled_positions(trajectory))
        return np.zeros(num) if scores.kl is None else kl_coef * scores.kl.astype(np.float64)

    def _is_trained(self, trajectory: wire.Trajectory) -> bool:
        return not trajectory.greedy and not (
            self._algorithm.mask_truncated and is_truncated(trajectory)
        )

    def _sample(
        self,
        group: wire.Group,
        trajectory: wire.Trajectory,
        advantages: FloatArray,
        *,
        with_all_tokens: bool = False,
    ) -> TrainSample:
        return from_trajectory(
            trajectory,
            add_teacher(advantages, trajectory, self._algorithm.distillation),
            group=group.ticket,
            temperature=group.temperature,
            trained=with_all_tokens or self._is_trained(trajectory),
        )

    def _clip(self, advantages: Sequence[FloatArray]) -> list[FloatArray]:
        limit = self._algorithm.advantage_clip
        if limit is None:
            return list(advantages)
        return [array.clip(-limit, limit) for array in advantages]


def waits_for_batch(algorithm: AlgorithmSection) -> str:
    """Return the setting, besides the estimator, that makes a step wait for its groups, or ""."""
    reasons = {
        "num_epochs and num_minibatches": num_updates(algorithm) > 1,
        "whiten_advantages": algorithm.whiten_advantages,
        "reward_normalization": needs_batch(algorithm.reward_normalization),
        "kl_placement": kl_in_reward(algorithm),
        "critic": algorithm.critic.enabled,
        f"pg_variant {algorithm.pg_variant}": algorithm.pg_variant in ("starpo_s", *SELECTORS),
    }
    return next((name for name, holds in reasons.items() if holds), "")


def scores_needed(algorithm: AlgorithmSection) -> bool:
    """Return whether the models must score the samples before the step."""
    # The forward pass of a single update yields the proximal logprobs itself.
    recompute = (
        algorithm.correction != "none"
        and algorithm.prox_logp_method == "recompute"
        and not algorithm.bypass
    )
    return (
        (recompute and num_updates(algorithm) > 1)
        or algorithm.pg_variant in SELECTORS
        or kl_in_reward(algorithm)
        or algorithm.critic.enabled
    )


def _scatter_values(trajectory: wire.Trajectory, values: Any) -> FloatArray:
    """Scatter (T,) values of the sampled tokens to (n,), 0 elsewhere."""
    array = np.zeros(len(trajectory.loss_mask.array()))
    array[sampled_positions(trajectory)] = values
    return array


def _as_column(trajectory: wire.Trajectory, values: Any) -> Array | None:
    return None if values is None else _scatter_values(trajectory, values).astype(np.float32)


def _as_float64(values: Any) -> FloatArray | None:
    return None if values is None else values.astype(np.float64)
