"""What one cell is: its name, how it is run, and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, Literal

import msgspec

from bench.families import engine_cells, learner_cells
from bench.families.reference import DifferenceError
from bench.families.scene import Scene
from broker.errors import ConfigError, RlearnerError, UserError

Outcome = Literal["works", "refused", "wrong", "broken"]

CELLS: Final[Mapping[str, Callable[[Scene], float]]] = {
    "engine": engine_cells.run_engine,
    "packed": learner_cells.run_packed,
    "padded": learner_cells.run_padded,
    "lora": learner_cells.run_lora,
    "weights": engine_cells.run_weights,
    "resume": learner_cells.run_resume,
    "export": learner_cells.run_export,
    "plan": learner_cells.run_plan,
}
DTYPES: Final = ("float32", "bfloat16")


class Verdict(msgspec.Struct, frozen=True):
    """The outcome of one cell.

    Attributes:
        outcome: ``refused`` by the program in its own words, ``wrong``: other numbers than
            transformers' or other files, ``broken``: an error that the program does not expect.
        reason: empty if it works.
        difference: largest of logprobs.
    """

    family: str
    dtype: str
    cell: str
    outcome: Outcome
    reason: str = ""
    difference: float = 0.0
    seconds: float = 0.0


def reason_of(error: BaseException, scene: Scene) -> tuple[Outcome, str]:
    """Return what an error means, and its reason without this machine's paths."""
    if isinstance(error, DifferenceError):
        outcome: Outcome = "wrong"
    elif isinstance(error, UserError):
        outcome = "refused"
    else:
        outcome = "broken"
    text = error.allowed if isinstance(error, ConfigError) else str(error)
    # what is allowed, said again by check
    text = text.removeprefix("null: ").removesuffix(": auto or padded")
    kind = "" if isinstance(error, DifferenceError | RlearnerError) else f"{type(error).__name__}: "
    for path in (scene.work, scene.folder):
        text = text.replace(str(path), "the model")
    return outcome, kind + " ".join(text.split())[:300]
