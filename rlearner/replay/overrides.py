"""Checks the overrides of a counterfactual: how the model is trained, not on which data. Pure."""

from __future__ import annotations

from typing import Any, Final

from broker.errors import ConfigError
from broker.settings.run_settings import RunSettings
from learner.reporting.trackers import flatten_settings

SECTIONS: Final = ("algorithm", "train")
# Settings of these sections that decide which tickets go out, which records count, or when the run
# ends.
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
# The only estimator that needs extra episodes.
GREEDY: Final = "remax"
# The only loss with which only some groups of a step are trained on.
SELECTING: Final = "starpo_s"


def changed_settings(recorded: RunSettings, requested: RunSettings) -> dict[str, Any]:
    """Return the settings in which two configurations differ, by dotted key.

    Raises:
        ConfigError: if one of them would change which data is consumed, or has no meaning in a
            replay.
    """
    old = flatten_settings(recorded.to_plain())
    new = flatten_settings(requested.to_plain())
    changes = {
        key: new.get(key) for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)
    }
    for key, value in changes.items():
        if key in FIXED or key.partition(".")[0] not in SECTIONS:
            free = f"algorithm.* and train.* except {', '.join(FIXED)}"
            raise ConfigError(key, value, f"a replay trains on the same data; it may change {free}")
        if key == "algorithm.adv_estimator" and GREEDY in (value, old.get(key)):
            reason = f"{GREEDY} needs greedy episodes, and the run was recorded with {old[key]}"
            raise ConfigError(key, value, reason)
        if key == "algorithm.pg_variant" and SELECTING in (value, old.get(key)):
            reason = f"{SELECTING} selects groups, and the run was recorded with {old[key]}"
            raise ConfigError(key, value, reason)
    return changes
