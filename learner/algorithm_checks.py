"""Refuses algorithm settings that do not work together, without importing torch or plug-ins."""

from __future__ import annotations

from typing import Any

from broker.errors import ConfigError
from broker.settings.config import takes_steps
from learner.algorithm.advantages import COUNT_EPISODES, NEEDS_GROUPS, WHOLE_BATCH
from learner.algorithm.assembly import waits_for_batch
from learner.algorithm.losses import DUAL_CLIP
from learner.config import AlgorithmSection, RewardNormalization


def check_algorithm(config: dict[str, Any]) -> None:
    """Check ``algorithm`` and the sections that depend on it.

    Raises:
        ConfigError: for the first combination that cannot work; names the settings that do.
    """
    algorithm = AlgorithmSection.model_validate(config["algorithm"])
    _check_values(algorithm)
    _check_critic(algorithm)
    _check_streaming(config["train"]["streaming"], algorithm)
    _check_correction(algorithm)
    for name, domain in config["domains"].items():
        _check_domain(name, domain, algorithm)
    if config["model"]["dtype"] == "float16":
        raise ConfigError("model.dtype", "float16", "float32 or bfloat16: gradients underflow in float16")


def _check_values(algorithm: AlgorithmSection) -> None:
    if algorithm.dual_clip is not None and algorithm.dual_clip <= 1:
        raise ConfigError("algorithm.dual_clip", algorithm.dual_clip, "above 1; 3 is usual")
    if algorithm.dual_clip is not None and algorithm.pg_variant not in DUAL_CLIP and ":" not in algorithm.pg_variant:
        allowed = (
            f"null with algorithm.pg_variant {algorithm.pg_variant}; it takes effect in {', '.join(sorted(DUAL_CLIP))}"
        )
        raise ConfigError("algorithm.dual_clip", algorithm.dual_clip, allowed)
    if algorithm.kl_coef and algorithm.pg_variant == "starpo_s":
        raise ConfigError(
            "algorithm.kl_coef", algorithm.kl_coef, "0 with algorithm.pg_variant starpo_s, which has no KL term"
        )
    if algorithm.mis_mask_level is not None and algorithm.correction != "mis":
        allowed = f"null with algorithm.correction {algorithm.correction}; only mis reads it"
        raise ConfigError("algorithm.mis_mask_level", algorithm.mis_mask_level, allowed)
    if algorithm.kl_target is not None and not algorithm.kl_coef:
        raise ConfigError(
            "algorithm.kl_target", algorithm.kl_target, "null, or algorithm.kl_coef above 0 to start from"
        )
    if algorithm.batch_adjust is not None and algorithm.num_minibatches == 1:
        raise ConfigError(
            "algorithm.batch_adjust",
            algorithm.batch_adjust,
            "null with algorithm.num_minibatches 1, which divides every number",
        )
    buffer, length = algorithm.overlong_buffer, algorithm.overlong_length
    if buffer and (length is None or length < buffer):
        raise ConfigError("algorithm.overlong_length", length, f"at least algorithm.overlong_buffer, which is {buffer}")


def _check_critic(algorithm: AlgorithmSection) -> None:
    estimator = algorithm.adv_estimator
    if estimator == "gae" and not algorithm.critic.enabled:
        raise ConfigError(
            "algorithm.critic.enabled", False, "true with algorithm.adv_estimator gae, which needs a critic"
        )
    if algorithm.critic.enabled and estimator != "gae" and ":" not in estimator:
        raise ConfigError(
            "algorithm.critic.enabled", True, f"false with algorithm.adv_estimator {estimator}; only gae reads a critic"
        )


def _check_streaming(streaming: str, algorithm: AlgorithmSection) -> None:
    whole = (
        f"adv_estimator {algorithm.adv_estimator}"
        if algorithm.adv_estimator in WHOLE_BATCH
        else waits_for_batch(algorithm)
    )
    if streaming == "always" and whole:
        raise ConfigError(
            "train.streaming", streaming, f"auto or never with algorithm.{whole}, which needs all groups of a step"
        )


def _check_correction(algorithm: AlgorithmSection) -> None:
    """Check that 1 lies between the bounds: on-policy every ratio is 1 and every correction the identity."""
    name, low, high = algorithm.correction, algorithm.correction_low, algorithm.correction_high
    bounded_above = name in ("tis", "decoupled", "icepop") or (name == "mis" and algorithm.mis_estimator == "k1")
    if bounded_above and high < 1:
        raise ConfigError(
            "algorithm.correction_high", high, f"at least 1 with algorithm.correction {name}: on-policy the ratio is 1"
        )
    if bounded_above and name in ("icepop", "mis") and low > 1:
        raise ConfigError(
            "algorithm.correction_low", low, f"at most 1 with algorithm.correction {name}: on-policy the ratio is 1"
        )


def _check_steps(key: str, algorithm: AlgorithmSection) -> None:
    """Check settings for step samples: treating each sample as an episode would weight long episodes more."""
    if algorithm.adv_estimator not in COUNT_EPISODES and ":" not in algorithm.adv_estimator:
        allowed = (
            f"full with algorithm.adv_estimator {algorithm.adv_estimator}; with steps: "
            f"{', '.join(sorted(COUNT_EPISODES))}"
        )
        raise ConfigError(f"{key}.context", "steps", allowed)
    if algorithm.format_penalty or algorithm.overlong_buffer or algorithm.reward_normalization != RewardNormalization():
        raise ConfigError(
            f"{key}.context", "steps", "full with algorithm.format_penalty, overlong_buffer or reward_normalization"
        )


def _check_domain(name: str, domain: dict[str, Any], algorithm: AlgorithmSection) -> None:
    key, estimator = f"domains.{name}", algorithm.adv_estimator
    if domain["group_size"] == 1:  # a group of one has no variance: nothing to compare with, and always filtered
        if estimator in NEEDS_GROUPS:
            raise ConfigError(f"{key}.group_size", 1, f"at least 2 with algorithm.adv_estimator {estimator}")
        if algorithm.filter_zero_variance:
            raise ConfigError(f"{key}.group_size", 1, "at least 2 with algorithm.filter_zero_variance")
        if algorithm.pg_variant == "starpo_s":
            raise ConfigError(
                f"{key}.group_size", 1, "at least 2 with algorithm.pg_variant starpo_s, which goes by their variance"
            )
    if domain["group_size_redundancy"] and estimator == "remax":  # the greedy episode is the baseline of all others
        raise ConfigError(
            f"{key}.group_size_redundancy", domain["group_size_redundancy"], "0 with algorithm.adv_estimator remax"
        )
    if takes_steps(domain["context"], estimator):
        _check_steps(key, algorithm)
    elif domain["thinking"] == "drop" and domain["max_turns"] > 1:
        raise ConfigError(
            f"{key}.thinking",
            "drop",
            "keep with whole conversations, trained as they were sampled; drop needs context: steps",
        )
    elif estimator == "gigpo":
        raise ConfigError(
            f"{key}.context",
            domain["context"],
            "auto or steps with algorithm.adv_estimator gigpo, which compares single steps",
        )
    if estimator == "gigpo" and domain["max_turns"] == 1:
        raise ConfigError(
            f"{key}.max_turns", 1, "above 1 with algorithm.adv_estimator gigpo, which compares the steps of episodes"
        )
