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

# Families of metrics that no replay can repeat.
CLOCKS = ("time", "perf")


def find_differences(values: Mapping[str, float], row: Mapping[str, Any] | None) -> list[str]:
    """Return one line for each number that differs from ``row``, the run's line of the step."""
    if row is None:
        return ["metrics.jsonl has no line"]
    families = {name.partition("/")[0] for name in values} - set(CLOCKS)
    names = values.keys() | {
        name for name in row if "/" in name and name.partition("/")[0] in families
    }
    differing = sorted(name for name in names if values.get(name) != row.get(name))
    return [
        f"{name} is {_format_value(values, name)}, the run had {_format_value(row, name)}"
        for name in differing
    ]


def tickets_by_step(lines: Iterable[LedgerLine]) -> dict[int, list[int]]:
    """Return the tickets of each step, in the order in which they were taken."""
    steps: dict[int, list[int]] = {}
    for line in lines:
        if line.step and line.state in ("trained", "filtered"):
            steps.setdefault(line.step, []).append(line.ticket)
    return steps


def tensors_digest(path: Path) -> str:
    """Return the digest of a checkpoint's tensors (weights, optimizer, schedule, RNG) in hex."""
    # The names of the files count, so that swapped files differ.
    whole = hashlib.sha256()
    for file in sorted(path.rglob("*.safetensors")):
        whole.update(str(file.relative_to(path)).encode() + b"\0")
        with file.open("rb") as data:
            # In blocks, because a checkpoint may be larger than memory.
            while block := data.read(1 << 24):
                whole.update(block)
    return whole.hexdigest()[:16]


def _format_value(values: Mapping[str, Any], name: str) -> str:
    return repr(values[name]) if name in values else "missing"


class ReplayComparison:
    """Comparison of replayed steps with the run in a folder."""

    def __init__(self, folder: Path) -> None:
        self._rows = {int(row["step"]): row for row in read_lines(folder / "metrics.jsonl")}
        self._tickets = tickets_by_step(
            ledger_segments.LedgerLines(folder / ledger_segments.FOLDER)
        )
        paths = checkpoint.list_checkpoints(folder / "checkpoints")
        self.checkpoints = {checkpoint.read_checkpoint(path).step: path for path in paths}
        self.steps: list[dict[str, Any]] = []
        self.digests: dict[int, tuple[str, str]] = {}

    @property
    def identical(self) -> bool:
        return not any(step["differences"] for step in self.steps)

    def step(self, replayed: ReplayedStep, replay_path: Path | None) -> str:
        """Compare one step, and the replay's checkpoint if there is one; return a line about it."""
        problems = find_differences(replayed.values, self._rows.get(replayed.step))
        run_tickets = self._tickets.get(replayed.step)
        if replayed.tickets != run_tickets:
            problems.insert(0, f"made of tickets {replayed.tickets}, the run of {run_tickets}")
        text = f"{len(replayed.values)} numbers of {len(replayed.tickets)} groups"
        if replay_path is not None:
            own_digest = tensors_digest(replay_path)
            run_digest = tensors_digest(self.checkpoints[replayed.step])
            self.digests[replayed.step] = (own_digest, run_digest)
            text += f", every tensor of the checkpoint ({own_digest})"
            if own_digest != run_digest:
                problems.append(
                    f"the digest of all tensors is {own_digest}, "
                    f"the run's checkpoint has {run_digest}"
                )
        self.steps.append(
            {"step": replayed.step, "differences": problems, "values": replayed.values}
        )
        if problems:
            return f"step {replayed.step}: differs: {'; '.join(problems)}"
        return f"step {replayed.step}: identical: {text}"

    def compared_with(self, replayed: ReplayedStep, names: Sequence[str]) -> str:
        """Return a line with some numbers of a counterfactual step next to the run's.

        Raises:
            RuntimeError: if the steps were made of different groups.
        """
        run_tickets = self._tickets.get(replayed.step)
        if replayed.tickets != run_tickets:
            raise RuntimeError(
                f"step {replayed.step} was made of tickets {replayed.tickets}, "
                f"the run's of {run_tickets}"
            )
        row = self._rows.get(replayed.step, {})
        common = [name for name in names if name in replayed.values and name in row]
        figures = [f"{name} {replayed.values[name]:.4g} (run {row[name]:.4g})" for name in common]
        return f"step {replayed.step}: {', '.join(figures)}"

    def figures(self) -> dict[str, Any]:
        first = next((step for step in self.steps if step["differences"]), None)
        return {
            "steps": len(self.steps),
            "identical": self.identical,
            "identical_steps": sum(not step["differences"] for step in self.steps),
            "first_difference": first
            and {"step": first["step"], "differences": first["differences"]},
            "digests": {
                str(step): {"replay": own_digest, "run": run_digest}
                for step, (own_digest, run_digest) in self.digests.items()
            },
        }

    def summary(self) -> str:
        """Return one line about all steps."""
        first = next((step for step in self.steps if step["differences"]), None)
        if first is not None:
            return f"DIFFERENT: first at step {first['step']}: {first['differences'][0]}"
        checkpoints = ", ".join(map(str, self.digests))
        if not checkpoints:
            return f"identical: {len(self.steps)} steps, no checkpoint to compare with"
        return f"identical: {len(self.steps)} steps, and all tensors of checkpoint {checkpoints}"
