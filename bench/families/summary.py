"""Sums up the verdicts of cells and the answers of the commands: rows of the matrix, and the
numbers that must hold.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import transformers

from bench.families.architectures import Architecture
from bench.families.program_checks import COMMANDS, REFUSED, Answer
from bench.families.verdicts import CELLS, DTYPES, Verdict
from rlearner_text.families import WORKS, Family, Matrix

_NUMBER: Final = re.compile(r"-?\d[\d.]*(?:e[-+]?\d+)?")
# rows are padded where they cannot be packed
NEEDED: Final = ("engine", "padded", "weights", "resume", "export")


def row_of(
    architecture: Architecture, verdicts: Sequence[Verdict], before: Matrix | None = None
) -> Family:
    """Return a family's row: a cell works if it does in every dtype; cells that were not run are
    those of before.
    """
    earlier = next(
        (row for row in (before.families if before else []) if row.name == architecture.name), None
    )
    ran = {verdict.cell for verdict in verdicts}
    # with the column of vLLM, which this command does not fill
    cells = dict(earlier.cells) if earlier else {}
    cells |= {cell: WORKS for cell in CELLS if cell in ran or cell not in cells}
    for verdict in sorted(verdicts, key=lambda verdict: DTYPES.index(verdict.dtype)):
        if verdict.outcome != "works" and cells[verdict.cell] == WORKS:
            cells[verdict.cell] = (
                verdict.reason
                if verdict.dtype == "float32"
                else f"{verdict.dtype}: {verdict.reason}"
            )
    return Family(architecture.name, architecture.kind, cells, dict(architecture.when))


def matrix_of(rows: Sequence[Family], before: Matrix | None) -> Matrix:
    """Return the matrix of these rows, and of the others that it had before."""
    new = {row.name: row for row in rows}
    kept = [new.pop(row.name, row) for row in (before.families if before else [])]
    return Matrix(transformers.__version__, [*kept, *new.values()])


@dataclass
class Summary:
    """Problems by kind, each as one line."""

    wrong: list[str] = field(default_factory=list)
    refused_late: list[str] = field(default_factory=list)
    needless: list[str] = field(default_factory=list)

    def judge(
        self, row: Family, verdicts: Sequence[Verdict], answers: Mapping[str, Answer]
    ) -> None:
        """Compare what a family's cells did with what the commands say."""
        for command, cells in COMMANDS.items():
            answer = answers[command]
            failed = [cell for cell in cells if row.cells[cell] != WORKS]
            if answer.code == REFUSED and not failed:
                self.needless.append(f"{row.name}, {command}: {answer.line}")
            elif failed and not (
                answer.code == REFUSED and any(_says(answer, row.cells[cell]) for cell in failed)
            ):
                outcomes = {verdict.outcome for verdict in verdicts if verdict.cell == failed[0]}
                kind = self.wrong if "wrong" in outcomes else self.refused_late
                kind.append(
                    f"{row.name}, {command}: accepted, but {failed[0]}: {row.cells[failed[0]]}"
                )


def _says(answer: Answer, reason: str) -> bool:
    """Return whether an answer gives a reason, whatever numbers were measured."""
    said, wanted = (_NUMBER.sub("#", text) for text in (answer.line, reason))
    return wanted in said


def figures(
    rows: Sequence[Family], architectures: Sequence[Architecture], summary: Summary
) -> dict[str, object]:
    """Return the numbers of the last line; families count by model_type, and work only in all their
    variants.
    """
    required = {architecture.name for architecture in architectures if architecture.required}
    types: dict[str, list[Family]] = {}
    for row in rows:
        types.setdefault(row.model_type, []).append(row)
    works = [
        name for name, group in types.items() if not any(row.refusal(*NEEDED) for row in group)
    ]
    adapted = [
        name
        for name, group in types.items()
        if not any(row.refusal(*NEEDED, "lora") for row in group)
    ]
    hybrids = [name for name in works if types[name][0].kind == "hybrid"]
    missing = [row.name for row in rows if row.name in required and row.refusal(*NEEDED)]
    return {
        "families": len(types),
        "missing": len(missing),
        "wrong": len(summary.wrong),
        "refused_late": len(summary.refused_late),
        "needless": len(summary.needless),
        "works": len(works),
        "lora_works": len(adapted),
        "hybrids_work": len(hybrids),
        "missing_names": missing,
    }
