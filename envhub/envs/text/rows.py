"""Reads question and answer rows of a data set; errors name the bad row."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final

import msgspec

from broker.errors import ConfigError, DataError
from envhub.envs.base import History
from envhub.envs.plain_row import fitting_columns
from rlearner_text.rows.columns import Row, column_names, column_value, digest_row
from rlearner_text.rows.messages import check_messages
from rlearner_text.rows.reading import read_rows
from rlearner_text.rows.sources import DataSource

log = logging.getLogger(__name__)

# Of a row's digest, which identifies a task.
KEY_BYTES: Final = 8


@dataclass(frozen=True)
class QuestionRow:
    """A question with its answer.

    Attributes:
        question: the last message of the user.
        answer: the reference, empty if the data set has none.
        history: what precedes the question.
        columns: those of the row that a sample can have, as JSON; null where only others have them.
        key: 8 bytes that equal rows share.
    """

    question: str
    answer: str
    history: History = ()
    columns: bytes = b"{}"
    key: bytes = b""


@dataclass(frozen=True)
class QuestionColumns:
    """Where question and answer are.

    Attributes:
        question: column with a text or a list of messages.
        answer: column with the reference answer; empty: there is none.
        answer_after: keep only the text after the last occurrence of this in the answer; empty
            keeps all.
    """

    question: str
    answer: str
    answer_after: str = ""


@dataclass
class RowCounts:
    """Counts of a data set: its rows, those equal to an earlier one, and those left out."""

    num_rows: int = 0
    num_duplicates: int = 0
    num_empty: int = 0

    def __str__(self) -> str:
        counts = f"{self.num_rows} rows, {self.num_duplicates} duplicates"
        return f"{counts}, {self.num_empty} without question or answer (left out)"


# a hub has hundreds of environments with the same file
@lru_cache(maxsize=64)
def load_questions(
    source: DataSource, columns: QuestionColumns
) -> tuple[tuple[QuestionRow, ...], RowCounts]:
    """Return every row with a question and an answer, in order; environments share one copy.

    Raises:
        ConfigError: if there is no such data set, or no row is left.
        DataError: if a row is malformed, or no row has the columns; names its line or number.
    """
    source.check("path")
    counts = RowCounts()
    rows: list[tuple[QuestionRow, Row]] = []
    names: Row = {}
    digests = set[bytes]()
    absent: dict[str, DataError] = {}
    for line, record in read_rows(source, "path"):
        digest = digest_row(record)
        counts.num_rows += 1
        counts.num_duplicates += digest in digests
        digests.add(digest)
        row = _read_row(source.path, line, record, columns, absent=absent)
        if row is not None:
            row = replace(row, key=digest[:KEY_BYTES])
        counts.num_empty += row is None
        names |= dict.fromkeys(record)
        rows += [(row, record)] if row is not None else []
    if not rows:
        if error := next(iter(absent.values()), None):
            raise error
        raise ConfigError("path", source.path, "the data set holds no rows with an answer")
    if counts.num_duplicates or counts.num_empty:
        log.info("%s: %s", source.path, counts)
    return tuple(_add_columns(row, names | record) for row, record in rows), counts


def _add_columns(row: QuestionRow, record: Row) -> QuestionRow:
    return replace(row, columns=msgspec.json.encode(fitting_columns(record)))


def _read_row(
    path: str, line: int, record: Row, columns: QuestionColumns, *, absent: dict[str, DataError]
) -> QuestionRow | None:
    """Return a row, None if it has no question or no answer; notes columns it lacks."""
    values: dict[str, Any] = {}
    for column in filter(None, (columns.question, columns.answer)):
        value = column_value(record, column)
        if value is None:
            problem = f"no column {column!r}; it has {column_names(record)}"
            absent.setdefault(column, DataError(path, line, problem))
        if value is None or value == [] or (isinstance(value, str) and not value.strip()):
            return None
        values[column] = value
    question = values[columns.question]
    history: History = ()
    if isinstance(question, list):
        try:
            messages = check_messages(question, "user")
            history = _read_history(messages[:-1])
        except ValueError as error:
            raise DataError(path, line, f"column {columns.question!r}: {error}") from None
        question = messages[-1]["content"]
    else:
        question = _read_text(path, line, columns.question, question)
    answer = ""
    if columns.answer:
        answer = _read_text(path, line, columns.answer, values[columns.answer])
        answer = _text_after(path, line, answer, columns)
    return QuestionRow(question, answer, history)


def _read_history(messages: list[dict[str, Any]]) -> History:
    for index, message in enumerate(messages):
        if message["role"] == "tool" or "tool_calls" in message:
            raise ValueError(
                f"message {index} has tool calls or results, which a prompt cannot have"
            )
    return tuple((message["role"], message["content"]) for message in messages)


def _read_text(path: str, line: int, column: str, value: Any) -> str:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str):
        raise DataError(path, line, f"column {column!r} holds {value!r}, not a text")
    return value


def _text_after(path: str, line: int, text: str, columns: QuestionColumns) -> str:
    marker = columns.answer_after
    if not marker:
        return text
    _, separator, tail = text.rpartition(marker)
    if not separator or not tail.strip():
        raise DataError(path, line, f"column {columns.answer!r} holds nothing after {marker!r}")
    return tail.strip()
