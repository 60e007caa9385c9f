"""Leaves out training questions that repeat others, or that evaluation sets hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from envhub.envs.text.rows import QuestionRow
from rlearner_text.rows.overlap import QuestionIndex

Rows = tuple[QuestionRow, ...]


@dataclass(frozen=True)
class CleaningRule:
    """What is left out.

    Attributes:
        repeated: questions equal to an earlier one.
        evaluated: questions that overlap with one of an evaluation set.
        num_words: that such a question has in common with it, in a row.
    """

    repeated: bool
    evaluated: bool
    num_words: int


@dataclass(frozen=True)
class TrainingRows:
    """The rows of each part of a data set that are trained on.

    Attributes:
        parts: in order.
        num_repeated: rows that were left out because an earlier one has their question.
        num_evaluated: rows that were left out because an evaluation set has their question.
    """

    parts: tuple[Rows, ...]
    num_repeated: int = 0
    num_evaluated: int = 0

    @property
    def rows(self) -> Rows:
        """The rows of all parts."""
        return tuple(row for part in self.parts for row in part)

    def __str__(self) -> str:
        texts = []
        if self.num_repeated:
            texts.append(f"{self.num_repeated} repeated (left out)")
        if self.num_evaluated:
            texts.append(f"{self.num_evaluated} in evaluation sets (left out)")
        return ", ".join(texts)


def clean_rows(
    parts: Sequence[Rows], evaluation_rows: Sequence[QuestionRow], rule: CleaningRule
) -> TrainingRows:
    """Return the rows of each part without those that the rule leaves out."""
    evaluated = QuestionIndex(rule.num_words)
    if rule.evaluated:
        evaluated.update(row.question for row in evaluation_rows)
    seen = QuestionIndex()
    num_repeated = 0
    num_evaluated = 0
    kept_parts: list[Rows] = []
    for part in parts:
        kept = []
        for row in part:
            if rule.evaluated and evaluated.overlaps(row.question):
                num_evaluated += 1
            elif rule.repeated and not seen.add(_whole_question(row)):
                num_repeated += 1
            else:
                kept.append(row)
        kept_parts.append(tuple(kept))
    return TrainingRows(tuple(kept_parts), num_repeated, num_evaluated)


def _whole_question(row: QuestionRow) -> str:
    return "\n".join([*(content for _, content in row.history), row.question])
