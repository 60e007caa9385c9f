"""Refuses algorithm settings that do not work together, by what estimators and losses declare.

Losses import torch, so their traits are only read if a setting that few losses support is set.
"""

from __future__ import annotations

from collections.abc import Sequence

from broker.contract.pass_rate import is_within
from broker.errors import ConfigError
from broker.settings.config import DomainSection, takes_steps
from broker.settings.registry import resolve
from broker.settings.run_settings import RunSettings
from learner.algorithm.advantages import ADVANTAGES
from learner.algorithm.assembly import waits_for_batch
from learner.algorithm.losses import LOSSES
from learner.algorithm.traits import EstimatorTraits, estimator_traits
from learner.backends.section_checks import check_values
from learner.config import AlgorithmSection, RewardNormalization, kl_in_reward
from learner.objective_checks import check_objective, loss_has


def check_algorithm(settings: RunSettings) -> None:
    """Check ``algorithm`` and the sections that depend on it.

    Raises:
        ConfigError: for the first combination that cannot work; names the settings that do.
    """
    algorithm = settings.algorithm
    check_values(settings.model, algorithm)
    _check_values(algorithm)
    traits = estimator_traits(resolve("advantages", algorithm.adv_estimator, ADVANTAGES))
    _check_critic(algorithm, traits)
    _check_parts(algorithm, traits)
    _check_estimator(settings, traits)
    _check_streaming(settings.train.streaming, algorithm, traits)
    check_objective(algorithm)
    _check_echo(settings)
    for name, domain in settings.domains.items():
        _check_thinking(name, domain, algorithm.adv_estimator)
    for name, domain in settings.trained_domains.items():
        _check_domain(name, domain, algorithm, traits)


def _check_values(algorithm: AlgorithmSection) -> None:
    loss_name = algorithm.pg_variant
    if algorithm.dual_clip is not None and not loss_has("dual_clip", loss_name):
        supporting = ", ".join(name for name in sorted(LOSSES) if loss_has("dual_clip", name))
        allowed = f"null with algorithm.pg_variant {loss_name}; it takes effect in {supporting}"
        raise ConfigError("algorithm.dual_clip", algorithm.dual_clip, allowed)
    if algorithm.kl_coef and not loss_has("kl", loss_name):
        allowed = f"0 with algorithm.pg_variant {loss_name}, which has no KL term"
        raise ConfigError("algorithm.kl_coef", algorithm.kl_coef, allowed)
    if algorithm.mis_mask_level is not None and algorithm.correction != "mis":
        allowed = f"null with algorithm.correction {algorithm.correction}; only mis reads it"
        raise ConfigError("algorithm.mis_mask_level", algorithm.mis_mask_level, allowed)
    if algorithm.kl_target is not None and not algorithm.kl_coef:
        allowed = "null, or algorithm.kl_coef above 0 to start from"
        raise ConfigError("algorithm.kl_target", algorithm.kl_target, allowed)
    if algorithm.batch_adjust is not None and algorithm.num_minibatches == 1:
        allowed = "null with algorithm.num_minibatches 1, which divides every number"
        raise ConfigError("algorithm.batch_adjust", algorithm.batch_adjust, allowed)
    bounds = algorithm.pass_rate
    if bounds is not None and bounds[0] > bounds[1]:
        raise ConfigError(
            "algorithm.pass_rate", bounds, "the lower share first, for example [0.2, 0.8]"
        )
    if algorithm.close_early and bounds is None:
        allowed = (
            "false without algorithm.pass_rate: what other filters decide is certain only at a "
            "group's end"
        )
        raise ConfigError("algorithm.close_early", True, allowed)
    buffer = algorithm.overlong_buffer
    length = algorithm.overlong_length
    if buffer and (length is None or length < buffer):
        raise ConfigError(
            "algorithm.overlong_length",
            length,
            f"at least algorithm.overlong_buffer, which is {buffer}",
        )


def estimators_with(trait: str) -> list[str]:
    """Return the sorted names of the shipped estimators that declare a trait."""
    traits = {
        name: estimator_traits(resolve("advantages", name, ADVANTAGES)) for name in ADVANTAGES
    }
    return sorted(name for name in traits if getattr(traits[name], trait))


def _check_critic(algorithm: AlgorithmSection, traits: EstimatorTraits | None) -> None:
    estimator = algorithm.adv_estimator
    enabled = algorithm.critic.enabled
    if traits is None or traits.needs_critic == enabled:
        return
    allowed = f"true with algorithm.adv_estimator {estimator}, which needs a critic"
    if enabled:
        supporting = ", ".join(estimators_with("needs_critic"))
        allowed = (
            f"false with algorithm.adv_estimator {estimator}; only {supporting} reads a critic"
        )
    raise ConfigError("algorithm.critic.enabled", enabled, allowed)


def _check_parts(algorithm: AlgorithmSection, traits: EstimatorTraits | None) -> None:
    """Check what only applies to rewards one by one, or only to their sum."""
    estimator = algorithm.adv_estimator
    if traits is None:
        return
    if not traits.reads_parts:
        if algorithm.gdpo_weights is not None:
            supporting = ", ".join(estimators_with("reads_parts"))
            allowed = f"null with algorithm.adv_estimator {estimator}; only {supporting} reads it"
            raise ConfigError("algorithm.gdpo_weights", algorithm.gdpo_weights, allowed)
        return
    if algorithm.gdpo_weights is not None and not any(algorithm.gdpo_weights.values()):
        allowed = "null, or a weight other than 0 for some reward"
        raise ConfigError("algorithm.gdpo_weights", algorithm.gdpo_weights, allowed)
    changed = {
        "reward_normalization": algorithm.reward_normalization != RewardNormalization(),
        "reward_clip": algorithm.reward_clip is not None,
        "format_penalty": algorithm.format_penalty > 0,
        "overlong_buffer": algorithm.overlong_buffer > 0,
        "kl_placement": kl_in_reward(algorithm),
    }
    for name, is_set in changed.items():
        if is_set:
            value = getattr(algorithm, name)
            shown = value.model_dump() if isinstance(value, RewardNormalization) else value
            allowed = (
                f"the default with algorithm.adv_estimator {estimator}, which compares the rewards "
                "one by one, not their sum"
            )
            raise ConfigError(f"algorithm.{name}", shown, allowed)


def _check_estimator(settings: RunSettings, traits: EstimatorTraits | None) -> None:
    """Check settings that only some estimators read, or that some cannot work with."""
    algorithm = settings.algorithm
    estimator = algorithm.adv_estimator
    if traits is None:
        return
    if algorithm.discount != "token" and not traits.discounts:
        supporting = ", ".join(estimators_with("discounts"))
        allowed = f"token with algorithm.adv_estimator {estimator}; it takes effect in {supporting}"
        raise ConfigError("algorithm.discount", algorithm.discount, allowed)
    if algorithm.pass_k is not None and not traits.takes_pass_k:
        supporting = ", ".join(estimators_with("takes_pass_k"))
        allowed = f"null with algorithm.adv_estimator {estimator}; only {supporting} reads it"
        raise ConfigError("algorithm.pass_k", algorithm.pass_k, allowed)
    if traits.needs_energies and settings.train.backend == "megatron":
        allowed = (
            f"another with train.backend megatron, which does not measure what {estimator} needs"
        )
        raise ConfigError("algorithm.adv_estimator", estimator, allowed)
    if traits.divides_by_mean:
        _check_positive_rewards(algorithm)


def _check_positive_rewards(algorithm: AlgorithmSection) -> None:
    """Refuse what makes rewards negative, or centres them, before they are divided by a mean."""
    plain = AlgorithmSection()
    normalization = algorithm.reward_normalization
    suffix = (
        f"with algorithm.adv_estimator {algorithm.adv_estimator}, which divides by a group's mean "
        "reward"
    )
    for name in ("format_penalty", "overlong_buffer"):
        if getattr(algorithm, name):
            allowed = f"{getattr(plain, name)} {suffix}"
            raise ConfigError(f"algorithm.{name}", getattr(algorithm, name), allowed)
    if normalization.norm_mean_type is not None:
        key = "algorithm.reward_normalization.norm_mean_type"
        raise ConfigError(key, normalization.norm_mean_type, f"null {suffix}")
    if kl_in_reward(algorithm):
        raise ConfigError("algorithm.kl_placement", "reward", f"loss {suffix}")


def _check_streaming(
    streaming: str, algorithm: AlgorithmSection, traits: EstimatorTraits | None
) -> None:
    uses_whole_batch = traits is not None and traits.whole_batch
    reason = (
        f"adv_estimator {algorithm.adv_estimator}"
        if uses_whole_batch
        else waits_for_batch(algorithm)
    )
    if streaming == "always" and reason:
        allowed = f"auto or never with algorithm.{reason}, which needs all groups of a step"
        raise ConfigError("train.streaming", streaming, allowed)


def _check_echo(settings: RunSettings) -> None:
    """Check that there is something to predict between the turns, and a backend that does."""
    algorithm = settings.algorithm
    if not algorithm.echo_coef:
        return
    if settings.train.backend == "megatron":
        allowed = "0 with train.backend megatron, which scores trained tokens only"
        raise ConfigError("algorithm.echo_coef", algorithm.echo_coef, allowed)
    if not any(
        domain.max_turns > 1 and not takes_steps(domain.context, algorithm.adv_estimator)
        for domain in settings.trained_domains.values()
    ):
        allowed = "0 without a domain of several turns and context full: nothing is said in between"
        raise ConfigError("algorithm.echo_coef", algorithm.echo_coef, allowed)


def _check_steps(key: str, algorithm: AlgorithmSection, traits: EstimatorTraits | None) -> None:
    """Check settings for step samples: counted as episodes, they would weight long ones more."""
    estimator = algorithm.adv_estimator
    if traits is not None and not traits.counts_episodes:
        supporting = ", ".join(estimators_with("counts_episodes"))
        allowed = f"full with algorithm.adv_estimator {estimator}; with steps: {supporting}"
        raise ConfigError(f"{key}.context", "steps", allowed)
    if (
        algorithm.format_penalty
        or algorithm.overlong_buffer
        or algorithm.reward_normalization != RewardNormalization()
    ):
        allowed = "full with algorithm.format_penalty, overlong_buffer or reward_normalization"
        raise ConfigError(f"{key}.context", "steps", allowed)


def _check_pass_rate(key: str, domain: DomainSection, bounds: Sequence[float] | None) -> None:
    """Refuse bounds that filter every group: shares of N episodes are multiples of 1/N."""
    if bounds is None:
        return
    max_size = domain.group_size
    min_size = domain.min_group_size or max_size
    if not any(
        is_within(solved, num_episodes, *bounds)
        for num_episodes in range(min_size, max_size + 1)
        for solved in range(num_episodes + 1)
    ):
        sizes = str(max_size) if min_size == max_size else f"{min_size} to {max_size}"
        allowed = (
            f"bounds with a share of successes between them that a group of {key}, {sizes} "
            "episodes, can have"
        )
        raise ConfigError("algorithm.pass_rate", list(bounds), allowed)


def _check_thinking(name: str, domain: DomainSection, estimator: str) -> None:
    """Check that thinking is dropped only where earlier turns are written again."""
    is_whole = not takes_steps(domain.context, estimator)
    if is_whole and domain.thinking == "drop" and domain.max_turns > 1:
        allowed = (
            "keep with whole conversations, trained as they were sampled; drop needs context: steps"
        )
        raise ConfigError(f"domains.{name}.thinking", "drop", allowed)


def _check_domain(
    name: str,
    domain: DomainSection,
    algorithm: AlgorithmSection,
    declared_traits: EstimatorTraits | None,
) -> None:
    key = f"domains.{name}"
    estimator = algorithm.adv_estimator
    traits = declared_traits or EstimatorTraits()
    # A group of one has no variance: it has nothing to compare with and is always filtered.
    if domain.group_size == 1:
        if traits.compares_group:
            raise ConfigError(
                f"{key}.group_size", 1, f"at least 2 with algorithm.adv_estimator {estimator}"
            )
        if algorithm.filter_zero_variance:
            raise ConfigError(
                f"{key}.group_size", 1, "at least 2 with algorithm.filter_zero_variance"
            )
        if algorithm.pg_variant == "starpo_s":
            allowed = "at least 2 with algorithm.pg_variant starpo_s, which goes by their variance"
            raise ConfigError(f"{key}.group_size", 1, allowed)
    if domain.group_size_redundancy and traits.greedy_baseline:
        allowed = f"0 with algorithm.adv_estimator {estimator}"
        raise ConfigError(f"{key}.group_size_redundancy", domain.group_size_redundancy, allowed)
    _check_pass_rate(key, domain, algorithm.pass_rate)
    if algorithm.pass_k is not None and algorithm.pass_k > domain.group_size:
        allowed = f"at most {key}.group_size, which is {domain.group_size}"
        raise ConfigError("algorithm.pass_k", algorithm.pass_k, allowed)
    if takes_steps(domain.context, estimator):
        _check_steps(key, algorithm, declared_traits)
    elif traits.compares_steps:
        allowed = (
            f"auto or steps with algorithm.adv_estimator {estimator}, which compares single steps"
        )
        raise ConfigError(f"{key}.context", domain.context, allowed)
    if traits.compares_steps and domain.max_turns == 1:
        allowed = (
            f"above 1 with algorithm.adv_estimator {estimator}, which compares the steps of "
            "episodes"
        )
        raise ConfigError(f"{key}.max_turns", 1, allowed)
