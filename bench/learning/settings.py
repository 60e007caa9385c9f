"""The arms of both sweeps, and every setting in which they differ from the quickstart and the
presets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from broker.settings.config import takes_steps
from broker.settings.config_file import shipped_folder
from broker.settings.runspec import load, validate

CONFIG: Final = "configs/quickstart.yaml"
SEEDS: Final = (0, 1, 2)
# Common to all arms. Half the quickstart's groups of a step, so that two cores suffice. Half its
# learning rate, decayed to 0: at a constant 1e-3 a step that has one or two groups of unequal
# rewards can undo in one update what all others have taught.
COMMON: Final = (
    *(
        "run.name=learning",
        "train.groups_per_step=8",
        "train.lr=5.0e-4",
        "train.lr_schedule=linear",
    ),
    *(
        "train.warmup_steps=2",
        "train.num_threads=1",
        "rollout.num_threads=1",
        "eval.tasks=512",
        "eval.temperature=1.0",
    ),
)
CONTEXTS: Final = ("full", "steps")
STEPS: Final = 20
# the first max_staleness of them are less late, as there is nothing older than version 0
STALE_STEPS: Final = 32
STALENESS: Final = (0, 1, 2, 4, 8, 16)
STALENESS_IN_ORDER: Final = (0, 4, 16, 1, 8, 2)  # of running them: what matters most comes first

# Where a preset's own settings are meant for another scale; docs/learning.md gives the reason next
# to the figures.
CHANGED: Final[dict[str, tuple[str, ...]]] = {}

# The second sweep: losses on the same estimator, aggregation and learning rate.
STALE: Final[dict[str, tuple[str, ...]]] = {
    "ppo": (),  # the quickstart's own section
    "decoupled": ("algorithm=decoupled", *CHANGED.get("decoupled", ())),
    "tis": ("algorithm=tis", *CHANGED.get("tis", ())),
    "gspo": ("algorithm=gspo", *CHANGED.get("gspo", ())),
    # whether it is the loss or its narrow clip
    "gspo_clip_0.2": ("algorithm=gspo", "algorithm.clip_low=0.2", "algorithm.clip_high=0.2"),
}
CORRECTED: Final = ("decoupled", "tis")  # of those, the ones that correct for staleness


@dataclass(frozen=True)
class ArmSettings:
    """One run.

    Attributes:
        sweep: ``algorithms``, ``staleness`` or ``start`` (the warm start itself, which is only
            measured).
        overrides: of the quickstart's configuration, all of them.
        episodes_per_map: of the measurement at the end.
    """

    sweep: str
    name: str
    seed: int
    max_staleness: int = 1
    overrides: tuple[str, ...] = field(default=())
    episodes_per_map: int = 1

    @property
    def path(self) -> str:
        late = f".late{self.max_staleness}" if self.sweep == "staleness" else ""
        return f"{self.sweep}/{self.name}{late}.seed{self.seed}.json"

    @property
    def context(self) -> str:
        config = self.config()
        steps = takes_steps(
            config["domains"]["lake"]["context"], config["algorithm"]["adv_estimator"]
        )
        return CONTEXTS[1] if steps else CONTEXTS[0]

    def config(self) -> dict[str, Any]:
        return validate(load(CONFIG, self.overrides))


def presets() -> list[str]:
    return sorted(path.stem for path in (shipped_folder() / "algorithm").glob("*.yaml"))


def start(seed: int, context: str) -> ArmSettings:
    overrides = (
        *COMMON,
        f"run.seed={seed}",
        "eval.group_size=4",
        f"domains.lake.context={context}",
    )
    return ArmSettings("start", f"warm_{context}", seed, overrides=overrides, episodes_per_map=4)


def starts(seed: int) -> list[ArmSettings]:
    return [start(seed, context) for context in CONTEXTS]


def algorithm(name: str, seed: int) -> ArmSettings:
    """Return the arm of a preset at the staleness of the quickstart, 1."""
    own = (f"run.seed={seed}", f"train.steps={STEPS}", "train.max_staleness=1", f"algorithm={name}")
    overrides = (*COMMON, *own, *CHANGED.get(name, ()))
    return ArmSettings("algorithms", name, seed, 1, overrides)


def stale(name: str, max_staleness: int, seed: int) -> ArmSettings:
    """Return the arm of a loss on groups that are exactly this late."""
    late = f"train.max_staleness={max_staleness}"
    overrides = (*COMMON, f"run.seed={seed}", f"train.steps={STALE_STEPS}", late, *STALE[name])
    return ArmSettings("staleness", name, seed, max_staleness, overrides)


def plan(
    seeds: Sequence[int], *, quick: bool, names: Sequence[str] | None = None
) -> list[ArmSettings]:
    """Return all arms, the most useful first; ``quick``: only the first seed of every algorithm."""
    names = presets() if names is None else names
    first = [*starts(seeds[0]), *(algorithm(name, seeds[0]) for name in names)]
    if quick:
        return first
    arms = first + [stale(name, late, seeds[0]) for late in STALENESS_IN_ORDER for name in STALE]
    for seed in seeds[1:]:
        arms += [*starts(seed), *(algorithm(name, seed) for name in names)]
    return arms + [
        stale(name, late, seed)
        for seed in seeds[1:]
        for late in STALENESS_IN_ORDER
        for name in STALE
    ]
