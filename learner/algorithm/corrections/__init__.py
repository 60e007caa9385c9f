"""Registry of off-policy corrections; a new one is one file plus one line here."""

from __future__ import annotations

from typing import Final

CORRECTIONS: Final[dict[str, str]] = {
    "none": "learner.algorithm.corrections.none:none",
    "decoupled": "learner.algorithm.corrections.decoupled:decoupled",
    "tis": "learner.algorithm.corrections.tis:tis",
    "icepop": "learner.algorithm.corrections.icepop:icepop",
    "mis": "learner.algorithm.corrections.mis:mis",
    "opsm": "learner.algorithm.corrections.opsm:opsm",
    "kpop": "learner.algorithm.corrections.kpop:kpop",
    "composed": "learner.algorithm.corrections.composed:composed",
}
