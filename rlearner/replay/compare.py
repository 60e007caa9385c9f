"""Compares a replayed step with the run's records, bit for bit; only times are ignored."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from learner.checkpoints import checkpoint
from learner.credit import ledger_segments
from learner.credit.ledger_file import LedgerLine
from learner.reporting.metrics import read_lines
from rlearner.replay.run import ReplayedStep

CLOCKS = ("time", "perf")


def differences(found: Mapping[str, float], row: Mapping[str, Any] | None) -> list[str]:
    """Return one line for each number of the replay that differs from ``row``, the run's line of
    the step, if any.
    """
    if row is None:
        return ["metrics.jsonl has no line"]
    families = {name.partition("/")[0] for name in found} - set(CLOCKS)
    names = found.keys() | {
        name for name in row if "/" in name and name.partition("/")[0] in families
    }
    wrong = sorted(name for name in names if found.get(name) != row.get(name))
    return [f"{name} is {_text(found, name)}, the run had {_text(row, name)}" for name in wrong]


def tickets_by_step(lines: Iterable[LedgerLine]) -> dict[int, list[int]]:
    """Return the tickets of each step, in the order in which they were taken."""
    steps: dict[int, list[int]] = {}
    for line in lines:
        if line.step and line.state in ("trained", "filtered"):
            steps.setdefault(line.step, []).append(line.ticket)
    return steps


def tensors_digest(path: Path) -> str:
    """Return the digest of all tensors in a checkpoint (weights, optimizer, schedule, RNG) as 16
    hex digits.
    """
    whole = hashlib.sha256()
    for file in sorted(path.rglob("*.safetensors")):
        whole.update(str(file.relative_to(path)).encode() + b"\0")
        with file.open("rb") as data:
            while block := data.read(1 << 24):
                whole.update(block)
    return whole.hexdigest()[:16]


def _text(values: Mapping[str, Any], name: str) -> str:
    return repr(values[name]) if name in values else "missing"


class ReplayComparison:
    """Comparison of replayed steps with the run in a folder."""

    def __init__(self, folder: Path) -> None:
        self._rows = {int(row["step"]): row for row in read_lines(folder / "metrics.jsonl")}
        self._made_of = tickets_by_step(
            ledger_segments.LedgerLines(folder / ledger_segments.FOLDER)
        )
        paths = checkpoint.list_checkpoints(folder / "checkpoints")
        self.kept = {checkpoint.read_checkpoint(path).step: path for path in paths}
        self.steps: list[dict[str, Any]] = []
        self.digests: dict[int, tuple[str, str]] = {}

    @property
    def identical(self) -> bool:
        return not any(step["differences"] for step in self.steps)

    def step(self, made: ReplayedStep, written: Path | None) -> str:
        """Compare one step, with the replay's checkpoint if the run kept one, and return a line
        with the result.
        """
        found = differences(made.values, self._rows.get(made.step))
        wanted = self._made_of.get(made.step)
        if made.tickets != wanted:
            found.insert(0, f"made of tickets {made.tickets}, the run of {wanted}")
        text = f"{len(made.values)} numbers of {len(made.tickets)} groups"
        if written is not None:
            own, kept = self.digests[made.step] = (
                tensors_digest(written),
                tensors_digest(self.kept[made.step]),
            )
            text += f", every tensor of the checkpoint ({own})"
            if own != kept:
                found.append(f"the digest of all tensors is {own}, the run's checkpoint has {kept}")
        self.steps.append({"step": made.step, "differences": found, "values": made.values})
        return f"step {made.step}: " + (
            f"differs: {'; '.join(found)}" if found else f"identical: {text}"
        )

    def compared_with(self, made: ReplayedStep, names: Sequence[str]) -> str:
        """Return a line with some numbers of a counterfactual step next to the run's.

        Raises:
            RuntimeError: if the steps were made of different groups.
        """
        if made.tickets != (wanted := self._made_of.get(made.step)):
            raise RuntimeError(
                f"step {made.step} was made of tickets {made.tickets}, the run's of {wanted}"
            )
        row = self._rows.get(made.step, {})
        common = [name for name in names if name in made.values and name in row]
        shown = [f"{name} {made.values[name]:.4g} (run {row[name]:.4g})" for name in common]
        return f"step {made.step}: {', '.join(shown)}"

    def figures(self) -> dict[str, Any]:
        first = next((step for step in self.steps if step["differences"]), None)
        return {
            "steps": len(self.steps),
            "identical": self.identical,
            "identical_steps": sum(not step["differences"] for step in self.steps),
            "first_difference": first
            and {"step": first["step"], "differences": first["differences"]},
            "digests": {
                str(step): {"replay": own, "run": kept}
                for step, (own, kept) in self.digests.items()
            },
        }

    def summary(self) -> str:
        """Return one line about all steps."""
        first = next((step for step in self.steps if step["differences"]), None)
        if first is not None:
            return f"DIFFERENT: first at step {first['step']}: {first['differences'][0]}"
        kept = ", ".join(map(str, self.digests))
        compared = (
            f"and all tensors of checkpoint {kept}" if kept else "no checkpoint to compare with"
        )
        return f"identical: {len(self.steps)} steps, {compared}"
