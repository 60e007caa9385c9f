"""The results of ``python -m bench.gpu`` so far, in a JSON file that survives an interruption."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from broker.errors import UserError
from broker.system.private_files import private_write


@dataclass(frozen=True)
class Outcome:
    """How one step ended: passed, failed, timed out or left out, with the reason of anything but
    passed.
    """

    state: str
    seconds: float = 0.0
    reason: str = ""
    result: Mapping[str, Any] = field(default_factory=dict)
    commit: str = ""  # of the code that ran

    @property
    def finished(self) -> bool:
        """Whether it ran, so that a resumed whole does not repeat it."""
        return self.state != "left out"


@dataclass
class State:
    """Outcomes by step, of one machine.

    Attributes:
        device: its GPUs; empty before the first step.
    """

    device: str = ""
    steps: dict[str, Outcome] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Time that the steps have taken so far."""
        return sum(outcome.seconds for outcome in self.steps.values())


def read_state(path: Path) -> State:
    """Return what a file holds; an empty state if there is none.

    Raises:
        UserError: if it is not such a file.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return State(
            found["device"], {name: Outcome(**one) for name, one in found["steps"].items()}
        )
    except FileNotFoundError:
        return State()
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(
            f"{path}: not a file of bench.gpu; name another with --out, or remove it"
        ) from None


def write_state(path: Path, state: State) -> None:
    """Replace the file as a whole.

    Raises:
        UserError: if it cannot be written.
    """
    steps = {name: asdict(outcome) for name, outcome in state.steps.items()}
    text = json.dumps({"bench": "bench.gpu", "device": state.device, "steps": steps}, indent=1)
    try:
        private_write(path, f"{text}\n".encode())
    except OSError as error:
        raise UserError(f"--out {path}: {error.strerror}") from None
