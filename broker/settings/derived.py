"""Settings whose default follows from others: the timeouts, and the dtype of weights on the way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from broker.settings import timeouts


def derive(config: dict[str, Any], scoring_s: Mapping[str, float]) -> None:
    """Fill in what a checked configuration leaves null.

    Args:
        scoring_s: see ``timeouts.derive``.
    """
    timeouts.derive(config, scoring_s)
    train = config["train"]
    if train["weights_dtype"] is None:
        # An engine would convert them anyway, and then has its own layout of an offer.
        train["weights_dtype"] = config["rollout"]["dtype"]


def release(config: dict[str, Any], scoring_s: Mapping[str, float]) -> dict[str, Any]:
    """Return a resolved configuration in which what ``derive`` would fill in equally is null again,
    so that it follows later changes.
    """
    released = timeouts.release(config, scoring_s)
    train = released["train"]
    if train["weights_dtype"] == released["rollout"]["dtype"]:
        train["weights_dtype"] = None
    return released
