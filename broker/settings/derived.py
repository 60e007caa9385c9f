"""Settings whose default follows from others: the timeouts, and the dtype of weights on the way."""

from __future__ import annotations

from collections.abc import Mapping

from broker.settings import timeouts
from broker.settings.run_settings import RunSettings


def derive(settings: RunSettings, scoring_s: Mapping[str, float]) -> RunSettings:
    """Return settings in which nothing is null that follows from others.

    Args:
        scoring_s: see ``timeouts.derive``.
    """
    settings = timeouts.derive(settings, scoring_s)
    if settings.train.weights_dtype is not None:
        return settings
    # An engine would convert them anyway, and then has its own layout of an offer.
    return settings.with_values("train", weights_dtype=settings.rollout.dtype)


def release(settings: RunSettings, scoring_s: Mapping[str, float]) -> RunSettings:
    """Return resolved settings in which what ``derive`` would fill in equally is null again, so
    that it follows later changes.
    """
    released = timeouts.release(settings, scoring_s)
    if released.train.weights_dtype == released.rollout.dtype:
        return released.with_values("train", weights_dtype=None)
    return released
