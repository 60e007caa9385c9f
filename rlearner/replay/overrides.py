"""Checks the overrides of a counterfactual: how the model is trained, not on which data. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from broker.errors import ConfigError
from learner.reporting.trackers import flatten

# FIXED: settings of these sections that decide which tickets go out, which records count, or when
# the run ends.
SECTIONS: Final = ("algorithm", "train")
FIXED: Final = (
    "train.steps",
    "train.groups_per_step",
    "train.max_staleness",
    "train.on_late",
    "train.ticket_timeout_s",
    "train.weights_bucket_mib",
    "train.weights_timeout_s",
    "algorithm.filter_zero_variance",
    "algorithm.group_filter",
    "algorithm.keep_fraction",
    "algorithm.pass_rate",
    "algorithm.close_early",
    "algorithm.max_replacements_per_step",
)
GREEDY: Final = "remax"  # the only estimator that needs extra episodes
SELECTING: Final = "starpo_s"  # the only loss with which only some groups of a step are trained on


def changed_settings(recorded: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings in which two validated configurations differ, by dotted key.

    Raises:
        ConfigError: if one of them would change which data is consumed, or has no meaning in a
            replay.
    """
    before = flatten(recorded)
    after = flatten(wanted)
    found = {
        key: after.get(key)
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
    }
    for key, value in found.items():
        if key in FIXED or key.partition(".")[0] not in SECTIONS:
            free = f"algorithm.* and train.* except {', '.join(FIXED)}"
            raise ConfigError(key, value, f"a replay trains on the same data; it may change {free}")
        if key == "algorithm.adv_estimator" and GREEDY in (value, before.get(key)):
            why = f"{GREEDY} needs greedy episodes, and the run was recorded with {before[key]}"
            raise ConfigError(key, value, why)
        if key == "algorithm.pg_variant" and SELECTING in (value, before.get(key)):
            why = f"{SELECTING} selects groups, and the run was recorded with {before[key]}"
            raise ConfigError(key, value, why)
    return found
