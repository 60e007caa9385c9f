"""Length estimators by name; a new one is one file plus one line here."""

from __future__ import annotations

from typing import Final

ESTIMATORS: Final[dict[str, str]] = {
    "history": "envhub.lengths.history:TaskHistory",
    "mean": "envhub.lengths.mean:RunningMean",
    "regression": "envhub.lengths.regression:OnlineRegression",
}
