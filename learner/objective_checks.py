"""Refuses corrections and divergences of an algorithm that have no effect, or that clash."""

from __future__ import annotations

from broker.errors import ConfigError
from broker.settings.registry import resolve
from learner.algorithm.losses import LOSSES
from learner.algorithm.traits import loss_traits
from learner.config import AlgorithmSection, RejectionSection


def check_objective(algorithm: AlgorithmSection) -> None:
    """Check the correction and the divergence from the reference.

    Raises:
        ConfigError: for the first setting that cannot work; names those that do.
    """
    _check_correction(algorithm)
    _check_rejections(algorithm)
    _check_bypass(algorithm)
    _check_divergence(algorithm)


def loss_has(trait: str, name: str) -> bool:
    """Whether a loss declares a trait; True for one that declares nothing."""
    return bool(getattr(loss_traits(resolve("losses", name, LOSSES)), trait, True))


def _check_correction(algorithm: AlgorithmSection) -> None:
    """Check that the bounds contain 1, the ratio of on-policy tokens, which need no correction."""
    name = algorithm.correction
    low = algorithm.correction_low
    high = algorithm.correction_high
    on_policy = f"1 with algorithm.correction {name}: on-policy the ratio is 1"
    bounded_above = name in ("tis", "decoupled", "icepop", "composed") or (
        name == "mis" and algorithm.mis_estimator == "k1"
    )
    if bounded_above and high < 1:
        raise ConfigError("algorithm.correction_high", high, f"at least {on_policy}")
    if bounded_above and name in ("icepop", "mis") and low > 1:
        raise ConfigError("algorithm.correction_low", low, f"at most {on_policy}")


def _check_rejections(algorithm: AlgorithmSection) -> None:
    """Check weight and rejections that are set apart."""
    name = algorithm.correction
    level = algorithm.correction_level
    rejections = algorithm.rejections
    if name != "composed":
        if level == "none":
            allowed = f"token, sequence or geometric with algorithm.correction {name}"
            raise ConfigError("algorithm.correction_level", level, f"{allowed}; none: composed")
        if rejections:
            allowed = f"[] with algorithm.correction {name}; only composed reads them"
            raise ConfigError("algorithm.rejections", f"{len(rejections)} criteria", allowed)
        return
    if level == "none" and not rejections:
        allowed = "token, sequence or geometric without algorithm.rejections: nothing is corrected"
        raise ConfigError("algorithm.correction_level", level, allowed)
    for index, rejection in enumerate(rejections):
        _check_rejection(f"algorithm.rejections.{index}", rejection)


def _check_rejection(key: str, rejection: RejectionSection) -> None:
    low = rejection.low
    if rejection.estimator != "k1":
        if low is not None:
            allowed = f"null with estimator {rejection.estimator}: a divergence has no lower bound"
            raise ConfigError(f"{key}.low", low, allowed)
        return
    if rejection.level == "max":
        allowed = "token, sequence or geometric with estimator k1; max: k2 and k3"
        raise ConfigError(f"{key}.level", rejection.level, allowed)
    if rejection.high < 1:
        raise ConfigError(f"{key}.high", rejection.high, "at least 1: on-policy the ratio is 1")
    if low is not None and low > 1:
        raise ConfigError(f"{key}.low", low, "at most 1: on-policy the ratio is 1")


def _check_bypass(algorithm: AlgorithmSection) -> None:
    """Check that a correction has an effect without a proximal policy."""
    if not algorithm.bypass:
        return
    name = algorithm.correction
    loss = algorithm.pg_variant
    if name in ("none", "decoupled"):
        reasons = {
            "none": "which takes ratios to the sampling policy in any case",
            "decoupled": "which needs a proximal policy",
        }
        allowed = f"false with algorithm.correction {name}, {reasons[name]}"
        raise ConfigError("algorithm.bypass", True, allowed)
    if algorithm.prox_logp_method != "recompute":
        allowed = "recompute with algorithm.bypass: there is no proximal policy to interpolate"
        raise ConfigError("algorithm.prox_logp_method", algorithm.prox_logp_method, allowed)
    only_weighs = name == "tis" or (name == "composed" and not algorithm.rejections)
    if only_weighs and loss_has("ratio", loss):
        allowed = (
            f"false with algorithm.correction {name} and pg_variant {loss}, whose own ratio is the "
            "weight then"
        )
        raise ConfigError("algorithm.bypass", True, allowed)


def _check_divergence(algorithm: AlgorithmSection) -> None:
    """Check how the divergence from the reference is estimated."""
    estimator = algorithm.kl_estimator
    if estimator.endswith("+") and algorithm.kl_placement == "reward":
        allowed = f"{estimator[:-1]} with algorithm.kl_placement reward, which has no gradient"
        raise ConfigError("algorithm.kl_estimator", estimator, allowed)
    if not algorithm.kl_importance:
        return
    if not algorithm.kl_coef or algorithm.kl_placement == "reward":
        allowed = "false without algorithm.kl_coef above 0 and kl_placement loss"
        raise ConfigError("algorithm.kl_importance", True, allowed)
    if estimator not in ("k1", "k3"):
        allowed = "k1 or k3 with algorithm.kl_importance, which corrects their gradient"
        raise ConfigError("algorithm.kl_estimator", estimator, allowed)
