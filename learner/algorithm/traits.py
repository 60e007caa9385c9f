"""Traits that advantage estimators and losses declare, against which settings are checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class EstimatorTraits:
    """Needs and abilities of an estimator."""

    # takes the rows of a whole step (a `BatchEstimator`), not one group's trajectories
    whole_batch: bool = False
    needs_critic: bool = False  # reads `BatchRow.values` and sets `AdvantageEstimate.returns`
    compares_group: bool = False  # compares the episodes of a group, so a group needs at least two
    # counts an episode once, however many samples it is cut into (context: steps)
    counts_episodes: bool = False
    compares_steps: bool = False  # compares single steps, so episodes need several, each a sample
    greedy_baseline: bool = False  # takes the group's greedy episode as the baseline of all others
    # reads `BatchRow.parts`, not the total, which shaping and the KL penalty change
    reads_parts: bool = False


@dataclass(frozen=True)
class LossTraits:
    """Which settings take effect with a loss; others are refused."""

    dual_clip: bool = False  # algorithm.dual_clip bounds it
    kl: bool = True  # a KL term may be added to it (algorithm.kl_coef)


def declares(traits: EstimatorTraits | LossTraits) -> Callable[[F], F]:
    """Attach traits to an estimator or a loss; the settings of one without them are not checked."""

    def attach(plugin: F) -> F:
        plugin.traits = traits  # type: ignore[attr-defined]
        return plugin

    return attach


def estimator_traits(estimator: Any) -> EstimatorTraits | None:
    """Return the traits that an estimator declares, or None."""
    traits = getattr(estimator, "traits", None)
    return traits if isinstance(traits, EstimatorTraits) else None


def loss_traits(loss: Any) -> LossTraits | None:
    """Return the traits that a loss declares, or None."""
    traits = getattr(loss, "traits", None)
    return traits if isinstance(traits, LossTraits) else None
