"""Entropy and importance ratio of each token that a step has trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from broker.contract import wire
from learner.algorithm.samples import Array, TrainSample

MAX_LOG_RATIO: Final = 80.0


@dataclass(frozen=True, eq=False)
class TokenFigures:
    """Figures of one trajectory's T trained tokens, in order; none if it was not trained on."""

    entropy: Array  # (T,) float16, nats, of the policy at the step's first pass
    log_ratio: Array  # (T,) float16, natural log of that policy's probability by the sampling one's

    def by_position(self, trajectory: wire.Trajectory) -> dict[int, tuple[float, float]]:
        """Return entropy and importance ratio by a token's position; empty if they do not fit."""
        # The token at 0 is never trained.
        positions = np.flatnonzero(trajectory.loss_mask.array()[1:]) + 1
        if len(positions) != len(self.entropy):
            return {}
        ratios = np.exp(self.log_ratio.astype(np.float64).clip(-MAX_LOG_RATIO, MAX_LOG_RATIO))
        rows = zip(positions.tolist(), self.entropy.tolist(), ratios.tolist(), strict=True)
        return {position: (entropy, ratio) for position, entropy, ratio in rows}


NO_FIGURES = TokenFigures(np.zeros(0, np.float16), np.zeros(0, np.float16))
# By ticket, for each trajectory of its group.
StepTokens = Mapping[int, Sequence[TokenFigures]]


class FigureCollector:
    """Collects a step's figures as its micro-batches are trained, so that no sample is kept."""

    def __init__(self) -> None:
        self._figures: dict[int, list[TokenFigures]] = {}
        # id of a sample -> ticket, number of the trajectory
        self._places: dict[int, tuple[int, int]] = {}

    def expect(self, ticket: int, samples: Sequence[TrainSample]) -> None:
        """Begin a group, with one sample for each of its trajectories, in order."""
        self._figures[ticket] = [NO_FIGURES] * len(samples)
        self._places.update((id(sample), (ticket, number)) for number, sample in enumerate(samples))

    def collect(self, figures_by_sample: Mapping[int, TokenFigures]) -> None:
        """Add figures by the id of a sample, which must not have been freed yet."""
        for sample, figures in figures_by_sample.items():
            if (place := self._places.pop(sample, None)) is not None:
                ticket, number = place
                self._figures[ticket][number] = figures

    def take(self) -> dict[int, list[TokenFigures]]:
        """Return the figures of a step by ticket, and begin the next."""
        figures = self._figures
        self._figures = {}
        # Samples without trained tokens remain; they may be freed, and their ids reused.
        self._places.clear()
        return figures
