"""Leaves out training rows that repeat others, or whose questions stand in the held-out rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from learner.offline.config import DataSection
from rlearner_text.rows.columns import Row
from rlearner_text.rows.overlap import QuestionIndex
from rlearner_text.rows.reading import read_rows

if TYPE_CHECKING:
    from learner.offline.data import SupervisedDialogue

# Words in a row that a question has in common with a held-out one: the default of ``qa``.
OVERLAP_WORDS: Final = 13
# Reasons that the log counts.
REPEATED: Final = "it repeats an earlier row"
EVALUATED: Final = "its question stands in the held-out rows"
# Returns the conversations of a row: one, or two for a pair.
ReadRow = Callable[[Row], Sequence["SupervisedDialogue"]]


@dataclass(frozen=True)
class RowFilter:
    """What is left out of a data set.

    Attributes:
        repeated: the rows so far; None: rows may repeat.
        evaluated: questions of the held-out rows; None: rows may have them.
    """

    repeated: QuestionIndex | None = None
    evaluated: QuestionIndex | None = None

    def find_reason(self, dialogues: Sequence[SupervisedDialogue]) -> str:
        """Return why the next row is left out, empty if it is not."""
        if self.evaluated is not None and self.evaluated.overlaps(question_of(dialogues[0])):
            return EVALUATED
        if self.repeated is not None and not self.repeated.add(text_of(dialogues)):
            return REPEATED
        return ""


def make_filter(data: DataSection, key: str, read_row: ReadRow) -> RowFilter:
    """Return the filter of a data set; held-out rows are all kept.

    Args:
        key: of the data set, ``data.train`` or ``data.eval``.
    """
    if key != "data.train":
        return RowFilter()
    evaluated = None
    source = data.held_out_source()
    if data.decontaminate and source is not None:
        evaluated = QuestionIndex(OVERLAP_WORDS)
        for _, row in read_rows(source, "data.eval"):
            # Malformed rows are reported where they are read to be evaluated.
            with suppress(ValueError):
                evaluated.add(question_of(read_row(row)[0]))
    return RowFilter(QuestionIndex() if data.deduplicate else None, evaluated)


def question_of(dialogue: SupervisedDialogue) -> str:
    """Return what the user says. System messages are left out: many rows share one."""
    contents = [msg["content"] for msg in dialogue.messages if msg["role"] == "user"]
    return "\n".join(contents)


def text_of(dialogues: Sequence[SupervisedDialogue]) -> str:
    """Return all texts of a row, with the tool calls."""
    return "\n".join(
        text
        for dialogue in dialogues
        for message in dialogue.messages
        for text in (message["content"], json.dumps(message.get("tool_calls") or ""))
    )
