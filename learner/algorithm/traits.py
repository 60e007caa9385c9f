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
    discounts: bool = False  # reads algorithm.discount, and gamma as that says
    divides_by_mean: bool = False  # divides by a group's mean reward, so it must not be below 0
    needs_energies: bool = False  # reads `BatchRow.energies`, which the models measure
    takes_pass_k: bool = False  # reads algorithm.pass_k


@dataclass(frozen=True)
class LossTraits:
    """Which settings take effect with a loss; others are refused."""

    dual_clip: bool = False  # algorithm.dual_clip bounds it
    kl: bool = True  # a KL term may be added to it (algorithm.kl_coef)
    ratio: bool = True  # has a ratio to the old policy, which is an importance weight itself
    selects_tokens: bool = False  # reads the selection of `learner.algorithm.token_selection`


@dataclass(frozen=True)
class PreferenceTraits:
    """Which settings take effect with a preference loss; others are refused."""

    label_smoothing: bool = False  # takes `label_smoothing` (dpo.label_smoothing)


def declares(
    traits: EstimatorTraits | LossTraits | PreferenceTraits,
) -> Callable[[F], F]:
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


def preference_traits(loss: Any) -> PreferenceTraits | None:
    """Return the traits that a preference loss declares, or None."""
    traits = getattr(loss, "traits", None)
    return traits if isinstance(traits, PreferenceTraits) else None
