"""Off-policy corrections by name; a new one is one file plus one line here. Resolved by ``broker.registry.resolve``."""

from __future__ import annotations

from typing import Final

CORRECTIONS: Final[dict[str, str]] = {
    "none": "learner.corrections.none:none",
    "decoupled": "learner.corrections.decoupled:decoupled",
    "tis": "learner.corrections.tis:tis",
    "icepop": "learner.corrections.icepop:icepop",
    "mis": "learner.corrections.mis:mis",
    "opsm": "learner.corrections.opsm:opsm",
}
